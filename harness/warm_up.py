"""Before the window: every kind of step once, up to a full batch, with prompts that the trial does not contain."""

from __future__ import annotations

import collections
import os
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from harness.decode_costs import Record, decode_costs, known_costs
from harness.steps import Tick, run_steps, run_to_end
from impls.engine import Engine
from impls.request import Request
from impls.seams import ForeignTarget, StepLimits, Topology
from workloads.stream import RequestStream

PROMPT_TOKENS = 12
OUTPUT_TOKENS = 4


@dataclass(frozen=True)
class WarmUp:
    """``startup_s``: from the start of this process to the end of its first step; ``ready_s``: to that of the warm-up,
    and so with every shape that is compiled or captured.

    ``decode_costs``: None without drafts, else as `decode_costs` gives them: what verification costs does not depend on
    whether the drafts are any good.
    """

    startup_s: float
    ready_s: float
    decode_costs: list[Record] | None

    def less(self, seconds: float) -> WarmUp:
        """Without so many seconds of another's work before the first step."""
        return replace(self, startup_s=self.startup_s - seconds, ready_s=self.ready_s - seconds)


def warm_up(engine: Engine, stream: RequestStream, tick: Tick = lambda: None) -> WarmUp:
    """RuntimeError if not even one warm-up request fits. ``tick``: called after each step."""
    requests = _requests(stream, engine.scheduler.max_num_seqs, engine.max_model_len)
    steps = run_steps(engine, requests[:1], tick)
    if next(steps, None) is None:
        raise RuntimeError("the warm-up ran no step: its requests were all rejected")
    startup_s = process_age_s()
    collections.deque(steps, maxlen=0)
    _warm_up_shapes(engine)
    collections.deque(run_steps(engine, requests, tick), maxlen=0)
    ready_s = process_age_s()
    costs = _calibrate(engine, requests, tick)
    engine.kv.reset_prefixes()  # a trial starts cold
    return WarmUp(startup_s, ready_s, costs)


def warm_up_foreign(
    target: ForeignTarget, stream: RequestStream, max_num_seqs: int, tick: Tick = lambda: None
) -> WarmUp:
    """As `warm_up`: one request, then ``max_num_seqs`` at once. ``startup_s`` ends with the first token."""
    requests = _requests(stream, max_num_seqs, target.max_model_len)
    results = run_to_end(target, requests[:1], tick)
    if not any(emission.token_ids for result in results for emission in result.emissions):
        raise RuntimeError("the warm-up gave no token: its requests were all rejected")
    startup_s = process_age_s()
    collections.deque(results, maxlen=0)
    collections.deque(run_to_end(target, requests, tick), maxlen=0)
    return WarmUp(startup_s, process_age_s(), None)


def warm_up_workers(target: Topology, stream: RequestStream, tick: Tick = lambda: None) -> WarmUp:
    """As `warm_up`, of all workers at once: as many requests as may run in all of them, past every hand-over. Costs are
    those of the last worker, which decodes in every topology."""
    limits = target.call(_limits)
    requests = _requests(stream, sum(most for most, _ in limits), min(length for _, length in limits))
    results = run_to_end(target, requests[:1], tick)
    if not any(emission.token_ids for result in results for emission in result.emissions):
        target.call(_limits)  # a worker that has died says why
        raise RuntimeError("the warm-up gave no token: its requests were all rejected")
    startup_s = process_age_s()
    collections.deque(results, maxlen=0)
    target.call(_warm_up_shapes)
    collections.deque(run_to_end(target, requests, tick), maxlen=0)
    ready_s = process_age_s()
    costs = target.call(partial(_calibrate, requests=requests))
    target.call(_forget_prefixes)
    return WarmUp(startup_s, ready_s, costs[-1]).less(target.waited_s)


def _limits(engine: Engine) -> tuple[int, int]:
    return engine.scheduler.max_num_seqs, engine.max_model_len


def _warm_up_shapes(engine: Engine) -> None:
    scheduler, proposer = engine.scheduler, engine.proposer
    drafts = proposer.num_draft_tokens if proposer is not None and engine.decoder.uses_proposer else 0
    limits = StepLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, engine.max_model_len, drafts)
    engine.executor.warm_up(limits)
    if engine.draft_executor is not None:  # after a full acceptance it is fed two tokens of a sequence
        engine.draft_executor.warm_up(replace(limits, num_draft_tokens=1))


def _calibrate(engine: Engine, requests: Seq[Request], tick: Tick = lambda: None) -> list[Record] | None:
    """What decoding costs, where it verifies drafts; a decoder that adapts is told."""
    if engine.proposer is None or not engine.decoder.uses_proposer:
        return None
    costs = decode_costs(engine, requests[: engine.scheduler.max_num_seqs], tick)
    known = known_costs(costs, engine.proposer.num_draft_tokens)
    if known.step_s and known.draft_s:
        engine.decoder.calibrate(known)
    return costs


def _forget_prefixes(engine: Engine) -> None:
    engine.kv.reset_prefixes()


def _requests(stream: RequestStream, count: int, max_model_len: int) -> list[Request]:
    output = max(1, min(OUTPUT_TOKENS, max_model_len // 4))
    prompt = max(1, min(PROMPT_TOKENS, max_model_len - output))
    found = stream.warmup_requests(count, prompt_tokens=prompt, max_tokens=output)
    return [
        replace(request, sampling=replace(request.sampling, ignore_eos=True, stop_token_ids=(), n=1))
        for request in found
    ]


def process_age_s() -> float:
    """Seconds since this process was started. On Linux by the clock that starts at boot and that nobody can set, in
    ticks of 10 ms; elsewhere the system tells the start by the wall clock alone.
    """
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # a name may hold blanks and brackets
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
