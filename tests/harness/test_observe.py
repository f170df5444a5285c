"""A window as it is observed: what lies before it, and a counter that is known at both its ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from fake_nvml import FakeNvml, source_of
from golden import FixedStream, request

import harness.drive
import harness.observe
from harness.drive import RealClock, drive
from harness.metrics import energy_joules
from harness.observe import Observed, observe
from harness.telemetry.options import TelemetryOptions
from harness.telemetry.sampler import Reading, Source
from harness.window import Window
from impls.request import Request
from impls.seams import Emission, StepResult, StepStats

LEAD_S = 10 * harness.observe.LEAD_S  # here, where other tests may keep the sampler's thread waiting
WATTS = 250.0
ARRIVALS = (0.0, 0.1, 0.25)
HELD = [{0: "a GPU"}, {1: "another"}]  # by two processes


class Meter(Source):
    """A GPU whose energy counter stands at 1000 J when it is made and then counts `WATTS`; it answers after 5 ms."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def read(self) -> Sequence[Reading]:
        joules = 1000.0 + WATTS * (time.perf_counter() - self._since)
        time.sleep(0.005)
        return [Reading("gpu0", "energy_j", joules, "J")]


class OneStep:
    """One token a request, in a step of 20 ms."""

    def __init__(self, clock: RealClock) -> None:
        self._clock, self._waiting = clock, list[str]()

    def add_request(self, request: Request) -> None:
        self._waiting.append(request.request_id)

    def step(self, until: float) -> StepResult:
        served, self._waiting, start = self._waiting, [], self._clock.now()
        time.sleep(0.02)
        end = self._clock.now()
        stats = StepStats(start, end, scheduled=served, running=len(served))
        return StepResult([Emission(name, (1,), end, "length") for name in served], stats)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)


class Memory:
    def reset(self) -> None:
        return

    def read(self) -> None:
        return None


@pytest.fixture(scope="module")
def seen() -> Iterator[Observed]:
    clock = RealClock()
    system: Any = SimpleNamespace(
        **{"config": {"device": {"name": "cuda"}}, "target": OneStep(clock), "pids": (), "gpus": lambda: HELD},
        **{"memory": Memory(), "step_cost": None},
    )
    stream: Any = FixedStream([request(str(i), 1, 1, at) for i, at in enumerate(ARRIVALS)])

    def begins_in_the_window(*arguments: Any, **options: Any) -> bool:
        assert clock.now() >= 0
        return drive(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.observe, "LEAD_S", LEAD_S)
        patch.setattr(harness.observe, "gpu_source", lambda held: Meter() if held is HELD else None)
        patch.setattr(harness.observe, "drive", begins_in_the_window)
        yield observe(
            system,
            stream,
            stream.initial(),
            clock,
            TelemetryOptions(rate_hz=10.0, profiler="none", profiler_steps=1, profiler_at=0.5),
            on_step=lambda result: None,
            should_stop=lambda: False,
        )


def test_energy_is_known_of_a_window_that_opens_at_once(seen: Observed) -> None:
    """`workload.warmup_s=0` of a timed loop: from 0 to the last arrival."""
    window = Window("timed", 0.0, ARRIVALS[-1])
    joules = energy_joules(seen.telemetry, window)
    assert joules == pytest.approx(WATTS * ARRIVALS[-1], rel=0.5)  # a busy machine reads late
    late: pd.DataFrame = seen.telemetry[seen.telemetry["t_s"] > 0]
    assert energy_joules(late, window) is None  # the sample from before it is what makes the difference


def test_nothing_but_samples_lies_before_the_window(seen: Observed) -> None:
    assert -LEAD_S <= seen.telemetry["t_s"].min() < 0
    assert seen.steps["start_s"].min() >= 0 and seen.completed
    assert (seen.requests["submitted_s"] >= seen.requests["intended_s"]).all()
    assert seen.requests["intended_s"].tolist() == list(ARRIVALS)


def test_a_pause_before_the_window_is_none_in_it(seen: Observed) -> None:
    """The first reading gives none, and the collection before the clock starts is not counted by the second."""
    pauses = seen.telemetry[seen.telemetry["name"] == "gc_pause_s"]
    assert len(pauses) >= 2 and pauses["value"].max() == 0.0


def test_the_counters_of_all_gpus_are_read_before_any_keeps_the_round_waiting() -> None:
    """20 ms for each of the two questions, without GPM: the second GPU's energy would be that much younger."""
    nvml = FakeNvml()
    source_of(nvml).read()
    asked = [name for name, *_ in nvml.calls]
    energy, slow = "nvmlDeviceGetTotalEnergyConsumption", asked.index("nvmlDeviceGetPcieThroughput")
    assert asked[:slow].count(energy) == 2 and asked[slow:] == ["nvmlDeviceGetPcieThroughput"] * 4


class FakeTime:
    """Stands still but in a sleep, and for a look at it."""

    now_s = 1000.0

    def perf_counter(self) -> float:
        self.now_s += 1e-4
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_clock_with_a_lead_shows_negative_times_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.drive, "time", FakeTime())
    clock = RealClock()
    clock.restart(0.03)
    assert clock.now() == pytest.approx(-0.03, abs=1e-3)
    clock.sleep_until(0.0)
    assert 0 <= clock.now() < 1e-3
    clock.restart()
    assert 0 <= clock.now() < 1e-3
