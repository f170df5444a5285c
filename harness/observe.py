"""One window: a stream is driven through a system and seen as it happens; what can be asked of both afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.drive import RealClock, drive
from harness.driven import Driven
from harness.linear_stages import Record
from harness.recorder import Recorder
from harness.steps import Tick
from harness.system.base import SystemUnderTest
from harness.telemetry.gpu import gpu_source
from harness.telemetry.host import HostSource, ProcessSource
from harness.telemetry.options import TelemetryOptions
from harness.telemetry.profiler import Profile
from harness.telemetry.sampler import Cost, Sampler, Source
from impls.request import Request
from impls.seams import StepResult
from workloads.stream import RequestStream

# Enough for a first round of samples: all counters come at once, then a GPU without GPM keeps it waiting for 40 ms.
LEAD_S = 0.05


@dataclass(frozen=True)
class Observed(Driven):
    """A window, as it was seen. ``completed``: nobody stopped it. ``ended_s``: when driving ended. ``telemetry_error``:
    why sampling ended before it.
    """

    completed: bool
    ended_s: float
    telemetry: pd.DataFrame
    telemetry_cost: Cost
    telemetry_error: str | None
    peak_memory_bytes: int | None


def observe(
    system: SystemUnderTest,
    stream: RequestStream,
    initial: list[Request],
    clock: RealClock,
    options: TelemetryOptions,
    *,
    on_step: Callable[[StepResult], None],
    should_stop: Callable[[], bool],
) -> Observed:
    """Drive the whole stream through the system. ``initial``: the stream's own; ``clock`` starts with the window.

    Sampling starts `LEAD_S` earlier, at times below 0: the energy of a window is known only between two samples of a
    counter, one of them from before it opened.
    """
    recorder = Recorder()
    gpus = gpu_source(system.gpus()) if system.config["device"]["name"] == "cuda" else None
    sources: list[Source] = [ProcessSource(system.pids), HostSource(), *([gpus] if gpus else [])]
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        system.memory.reset()
        clock.restart(LEAD_S)
        with Sampler(sources, clock, options.rate_hz) as sampler:
            clock.sleep_until(0.0)
            completed = drive(
                system.target, stream, recorder, clock, initial=initial, on_step=on_step, should_stop=should_stop
            )
            ended_s = clock.now()
        telemetry = sampler.stop()
    finally:
        gc.enable()
        gc.unfreeze()
    peak_memory = system.memory.read()
    return Observed(
        completed=completed,
        ended_s=ended_s,
        sent=recorder.sent(),
        requests=recorder.requests(),
        steps=recorder.steps(system.step_cost),
        telemetry=telemetry,
        telemetry_cost=sampler.cost,
        telemetry_error=sampler.error,
        peak_memory_bytes=peak_memory,
    )


@dataclass(frozen=True)
class Examined:
    """What a system showed after its window, and ``trouble``: what could not be learnt, as warnings."""

    linear_stages: list[Record] | None
    quality: dict[str, Any] | None
    profile: Profile
    trouble: list[str]


def examine(
    system: SystemUnderTest,
    seen: Observed,
    options: TelemetryOptions,
    *,
    first: bool,
    tick: Tick,
    should_stop: Callable[[], bool],
) -> Examined:
    """``first``: the arm's first trial. What the numbers do to quality is the same in each."""
    whole = seen.completed and not system.deaths
    stages, untimed = system.time_linear_layers() if whole else (None, [])
    quality, unknown = system.quality(tick) if whole and first else (None, [])
    profile = Profile()
    if seen.completed:
        profile = system.profile(seen, options, tick=tick, should_stop=should_stop)
    return Examined(stages, quality, profile, [*untimed, *unknown, *profile.warnings])
