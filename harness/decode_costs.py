"""What a decode step costs by its rows, and drafting by its sequences, timed in warm-up: its drafts mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import TypedDict

from torch import Tensor

from harness.steps import Tick, run_steps
from impls.engine import Engine
from impls.request import Request, Sequence
from impls.seams import DecodeCosts, DraftTokens, ModelRunner, Proposer, StepBatch

STEPS = 3  # of each kind: enough for a median


class Record(TypedDict):
    """One kind of decode step, which has one row a sequence and one a draft. step_s: all of it but the drafting.

    propose_s: what the arm's own proposer takes to draft in full for so many sequences, whatever the rows of the step;
    None where that did not fit.
    """

    sequences: int
    rows: int
    forward_s: float
    step_s: float
    propose_s: float | None


class Placeholders(Proposer):
    """Drafts of a given length. Whether any is accepted changes no step's cost.

    At full length ``timed`` drafts in earnest, and what it drafted is thrown away.
    """

    def __init__(self, timed: Proposer) -> None:
        self.num_draft_tokens, self.max_lookahead_tokens = timed.num_draft_tokens, timed.max_lookahead_tokens
        self.length = timed.num_draft_tokens
        self.in_earnest = False  # whether the latest drafts were timed
        self._timed = timed

    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        lengths = {seq.seq_id: min(self.length, k[seq.seq_id]) for seq in sequences}
        self.in_earnest = set(lengths.values()) == {self.num_draft_tokens}
        if self.in_earnest:
            self._timed.propose(sequences, k, runner)
        return {seq.seq_id: DraftTokens([seq.token_ids[-1]] * lengths[seq.seq_id]) for seq in sequences}

    def observe(self, batch: StepBatch, hidden_states: Tensor | None) -> None:
        self._timed.observe(batch, hidden_states)

    def forget(self, seq_id: str) -> None:
        self._timed.forget(seq_id)


def sequence_counts(most: int) -> list[int]:
    """1, 4, 16, ... and ``most``: with and without drafts they cover the rows that a decode step can have."""
    return sorted({min(4**i, most) for i in range(most.bit_length())})


def draft_lengths(most: int) -> list[int]:
    """``most``, 0, and 1, 2, 4, ... between them: the first two matter most, and come first where room is short."""
    return [most, 0, *(2**i for i in range(most.bit_length()) if 2**i < most)]


def decode_costs(engine: Engine, requests: Seq[Request], tick: Tick) -> list[Record]:
    """Medians over decode steps with drafts of several lengths, for several numbers of sequences.

    ``requests``: as many as may run at once, of short prompts. Contexts are of a few tokens. A kind of step that the
    cache or the limit on the length does not allow is left out; nothing stays in the engine.
    """
    proposer = engine.proposer
    assert proposer is not None
    lengths = draft_lengths(proposer.num_draft_tokens)
    room = engine.max_model_len - max(len(request.prompt_token_ids) for request in requests)
    longest = min((STEPS + 2) * (sum(lengths) + len(lengths)), room)  # every draft may be accepted
    longer = [replace(r, sampling=replace(r.sampling, max_tokens=longest)) for r in requests]
    kinds: dict[tuple[int, int], list[tuple[float, float]]] = {}
    drafting: dict[int, list[float]] = {}
    try:
        for count in sequence_counts(len(requests)):
            placeholders = engine.proposer = Placeholders(proposer)
            steps = (step for step in run_steps(engine, longer[:count], tick) if not step.prefill_tokens)
            for step in islice(steps, len(lengths) * (STEPS + 2)):
                drafts, uneven = divmod(step.draft_tokens, max(1, step.running))
                if drafts in lengths and not uneven:
                    seconds = (step.forward_s, step.end_s - step.start_s - step.propose_s)
                    kinds.setdefault((step.running, step.running + step.draft_tokens), []).append(seconds)
                if placeholders.in_earnest:
                    drafting.setdefault(step.running, []).append(step.propose_s)
                lacking = [n for n in lengths if len(kinds.get((count, count * (1 + n)), ())) < STEPS]
                if not lacking:
                    break
                placeholders.length = lacking[0]
            for request in longer[:count]:
                engine.abort(request.request_id)
    finally:
        engine.proposer = proposer
    return [
        Record(
            sequences=sequences,
            rows=rows,
            forward_s=median(forward_s for forward_s, _ in found),
            step_s=median(step_s for _, step_s in found),
            propose_s=median(drafting[sequences]) if sequences in drafting else None,
        )
        for (sequences, rows), found in sorted(kinds.items())
    ]


def known_costs(records: Seq[Record], num_draft_tokens: int) -> DecodeCosts:
    """``records``: in ascending order. Of equally many rows those of the most sequences count."""
    drafting = {record["sequences"]: record["propose_s"] for record in records}
    return DecodeCosts(
        step_s={record["rows"]: record["step_s"] for record in records},
        draft_s={count: s / num_draft_tokens for count, s in drafting.items() if s is not None},
    )
