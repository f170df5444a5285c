"""What a decode step costs by its number of rows: timed in warm-up, with drafts that mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import median

from harness.steps import Tick, run_steps
from impls.engine import Engine
from impls.request import Request, Sequence
from impls.seams import DraftTokens, ModelRunner, Proposer

STEPS = 3  # of each kind: enough for a median
Record = dict[str, int | float]


class Placeholders(Proposer):
    """Full drafts at every second step and none between. Whether any is accepted changes no step's cost."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._turn = 0

    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        self._turn += 1
        if self._turn % 2:
            return {}
        return {s.seq_id: DraftTokens([s.token_ids[-1]] * k[s.seq_id]) for s in sequences}


def sequence_counts(most: int) -> list[int]:
    """1, 4, 16, ... and ``most``: with and without drafts they cover the rows that a decode step can have."""
    return sorted({min(4**i, most) for i in range(most.bit_length())})


def decode_costs(engine: Engine, requests: Seq[Request], tick: Tick) -> list[Record]:
    """{sequences, rows, forward_s}: the median forward seconds of decode steps, one row a sequence and all drafts.

    ``requests``: as many as may run at once, of short prompts. Contexts are of a few tokens. A kind of step that the
    cache or the limit on the length does not allow is left out; nothing stays in the engine.
    """
    assert engine.proposer is not None
    drafts = engine.proposer.num_draft_tokens
    room = engine.max_model_len - max(len(request.prompt_token_ids) for request in requests)
    longest = min((STEPS + 1) * (drafts + 2), room)
    longer = [replace(r, sampling=replace(r.sampling, max_tokens=longest)) for r in requests]
    seconds: dict[tuple[int, int], list[float]] = {}
    proposer = engine.proposer
    try:
        for count in sequence_counts(len(requests)):
            engine.proposer = Placeholders(drafts)
            for step in run_steps(engine, longer[:count], tick):
                kinds = [(step.running, step.running), (step.running, step.running * (drafts + 1))]
                kind = (step.running, step.running + step.draft_tokens)
                if not step.prefill_tokens and kind in kinds:
                    seconds.setdefault(kind, []).append(step.forward_s)
                if all(len(seconds.get(kind, ())) >= STEPS for kind in kinds):
                    break
            for request in longer[:count]:
                engine.abort(request.request_id)
    finally:
        engine.proposer = proposer
    return [
        {"sequences": sequences, "rows": rows, "forward_s": median(found)}
        for (sequences, rows), found in sorted(seconds.items())
    ]
