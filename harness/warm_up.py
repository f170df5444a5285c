"""Before the window: every kind of step once, up to a full batch, with prompts that the trial does not contain."""

from __future__ import annotations

import collections
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from harness.decode_costs import Record, decode_costs
from harness.steps import Tick, run_steps
from impls.engine import Engine
from workloads.stream import RequestStream

PROMPT_TOKENS = 12
OUTPUT_TOKENS = 4


@dataclass(frozen=True)
class WarmUp:
    """``startup_s``: from the start of this process to the end of its first step.

    ``decode_costs``: None without drafts, else as `decode_costs` gives them: what verification costs does not depend on
    whether the drafts are any good.
    """

    startup_s: float
    decode_costs: list[Record] | None


def warm_up(engine: Engine, stream: RequestStream, tick: Tick = lambda: None) -> WarmUp:
    """RuntimeError if not even one warm-up request fits. ``tick``: called after each step."""
    output = max(1, min(OUTPUT_TOKENS, engine.max_model_len // 4))
    prompt = max(1, min(PROMPT_TOKENS, engine.max_model_len - output))
    drafts = engine.proposer is not None and engine.decoder.uses_proposer
    requests = [
        replace(request, sampling=replace(request.sampling, ignore_eos=True))
        for request in stream.warmup_requests(
            engine.scheduler.max_num_seqs, prompt_tokens=prompt, max_tokens=output
        )
    ]
    steps = run_steps(engine, requests[:1], tick)
    if next(steps, None) is None:
        raise RuntimeError("the warm-up ran no step: its requests were all rejected")
    startup_s = process_age_s()
    collections.deque(steps, maxlen=0)
    engine.executor.warm_up(engine.scheduler.max_num_seqs)
    collections.deque(run_steps(engine, requests, tick), maxlen=0)
    costs = decode_costs(engine, requests, tick) if drafts else None
    engine.kv.reset_prefixes()  # a trial starts cold
    return WarmUp(startup_s, costs)


def process_age_s() -> float:
    """Seconds since this process was started. On Linux by the clock that starts at boot and that nobody can set, in
    ticks of 10 ms; elsewhere the system tells the start by the wall clock alone.
    """
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # a name may hold blanks and brackets
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
