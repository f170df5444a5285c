"""Before the window: every kind of step once, up to a full batch, with prompts that the trial does not contain."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import psutil

from impls.engine import Engine
from impls.request import Request, Sequence
from impls.seams import DraftTokens, ModelRunner, Proposer, StepStats
from workloads.stream import RequestStream

PROMPT_TOKENS = 12
OUTPUT_TOKENS = 4
VERIFY_STEPS = 3  # of each kind: enough for a median


@dataclass(frozen=True)
class WarmUp:
    """``startup_s``: from the start of this process to the end of its first step.

    ``verify_cost``: None without drafts, else {rows, sequences, step_s: {plain, verify}}: forward seconds of a decode
    step of all sequences with one row each, and with ``rows`` = num_draft_tokens + 1 rows each, at a context of a few
    tokens. What a step of verification costs does not depend on whether the drafts are any good.
    """

    startup_s: float
    verify_cost: dict[str, Any] | None


class _Placeholders(Proposer):
    """Full drafts at every second step and none between: nothing of them is meant to be accepted."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._turn = 0

    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        self._turn += 1
        if self._turn % 2:
            return {}
        return {s.seq_id: DraftTokens([s.token_ids[-1]] * k[s.seq_id]) for s in sequences}


def warm_up(engine: Engine, stream: RequestStream) -> WarmUp:
    """RuntimeError if not even one warm-up request fits."""
    drafts = engine.proposer.num_draft_tokens if engine.proposer is not None and engine.decoder.uses_proposer else 0
    requests = [
        replace(request, sampling=replace(request.sampling, ignore_eos=True))
        for request in stream.warmup_requests(
            engine.scheduler.max_num_seqs, prompt_tokens=PROMPT_TOKENS, max_tokens=OUTPUT_TOKENS
        )
    ]
    steps = _steps(engine, requests[:1])
    if next(steps, None) is None:
        raise RuntimeError("the warm-up ran no step: its requests were all rejected")
    startup_s = time.time() - psutil.Process().create_time()
    collections.deque(steps, maxlen=0)
    engine.executor.warm_up(engine.scheduler.max_num_seqs)
    collections.deque(_steps(engine, requests), maxlen=0)
    return WarmUp(startup_s, _verify_cost(engine, requests, drafts) if drafts else None)


def _verify_cost(engine: Engine, requests: Seq[Request], drafts: int) -> dict[str, Any] | None:
    """None where the limit on the length leaves no room for as many drafts."""
    room = (VERIFY_STEPS + 1) * (drafts + 2)
    longer = [replace(r, sampling=replace(r.sampling, max_tokens=room)) for r in requests]
    seconds: dict[int, tuple[list[float], list[float]]] = {}  # sequences in the step -> plain, verify
    proposer, engine.proposer = engine.proposer, _Placeholders(drafts)
    try:
        for step in _steps(engine, longer):
            if step.prefill_tokens or step.draft_tokens not in (0, drafts * step.running):
                continue
            plain, verify = seconds.setdefault(step.running, ([], []))
            (verify if step.draft_tokens else plain).append(step.forward_s)
            if min(len(plain), len(verify)) >= VERIFY_STEPS:
                break
    finally:
        for request in longer:
            engine.abort(request.request_id)
        engine.proposer = proposer
    sequences = max((n for n, (plain, verify) in seconds.items() if plain and verify), default=0)
    if not sequences:
        return None
    step_s = {kind: median(found) for kind, found in zip(("plain", "verify"), seconds[sequences], strict=True)}
    return {"rows": drafts + 1, "sequences": sequences, "step_s": step_s}


def _steps(engine: Engine, requests: Seq[Request]) -> Iterator[StepStats]:
    """Run these requests, step by step, to their ends."""
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        stats = engine.step(math.inf).stats
        if stats is not None:
            yield stats
