"""Targets of the tiny model for these tests, from real configs, and everything that a run of one gave."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from harness.arm import resolve_study
from harness.compose import compose_arm
from harness.drive import RealClock
from impls.build import build_target
from impls.models.source import open_model
from impls.request import Request, SamplingParams
from impls.seams import StepStats

LIMIT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
# A whole trial, from the command line.
ARM = [
    *("study=none", "model=tiny", "device=cpu", "attention=sdpa", "workload/prompts=random", "workload/arrivals=burst"),
    *("workload/prompt_length=constant", "workload.prompt_length.value=40", "workload/output_length=constant"),
    *("workload.output_length.value=12", "workload.num_requests=8", "batching.max_num_seqs=4"),
    *("model.max_model_len=128", "kv_cache.budget=1024tokens", "batching.max_num_batched_tokens=128"),
]
BASE = (
    *("study=none", "model=tiny", "device=cpu", "device.threads=1", "attention=sdpa", "precision=fp32"),
    *("model.max_model_len=128", "batching.max_num_batched_tokens=128", "batching.max_num_seqs=4"),
    *("kv_cache.budget=4096tokens", "workload/prompts=random"),
)


def config_of(*overrides: str) -> dict[str, Any]:
    given = {override.partition("=")[0] for override in overrides}
    base = [override for override in BASE if override.partition("=")[0] not in given]
    return resolve_study({"arm": compose_arm([*base, *overrides])})["arm"]


def target_of(config: dict[str, Any]) -> Any:
    return build_target(config, open_model(config["model"]), RealClock())


def requests_of(count: int, *, prompt: int = 20, output: int = 16, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            f"r{i}",
            tuple(int(token) for token in rng.integers(0, 512, prompt + i % 7)),
            SamplingParams(max_tokens=output, ignore_eos=True),
        )
        for i in range(count)
    ]


@dataclass
class Run:
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)


def run(target: Any, requests: Sequence[Request], between: Callable[[Run], None] = lambda so_far: None) -> Run:
    """Everything submitted at once and run to its end; ``between``: after every step. AssertionError if it hangs."""
    found = Run()
    began = time.monotonic()
    for request in requests:
        target.add_request(request)
    while target.has_work:
        result = target.step(target.clock.now() + 1.0 if hasattr(target, "router") else math.inf)
        if result.stats is not None:
            found.steps.append(result.stats)
        for emission in result.emissions:
            assert emission.request_id not in found.ends
            found.tokens[emission.request_id] += emission.token_ids
            found.times[emission.request_id].append(emission.time_s)
            if emission.finish_reason is not None:
                found.ends[emission.request_id] = emission.finish_reason
                if emission.error:
                    found.errors[emission.request_id] = emission.error
        between(found)
        assert time.monotonic() - began < LIMIT_S, f"hangs: {len(found.ends)} of {len(requests)} ended"
    return found


def gone(pids: dict[str, int]) -> bool:
    """Have all of these ended, within ten seconds?"""
    for _ in range(500):
        alive = [pid for pid in pids.values() if psutil.pid_exists(pid) and not _is_zombie(pid)]
        if not alive:
            return True
        time.sleep(0.02)
    return False


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def shared_memory() -> set[str]:
    """What multiprocessing has in shared memory under a name, if anything."""
    if not SHARED_MEMORY.exists():
        return set()
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(("pym", "psm"))}
