"""The sampler, its cost, and what process and host tell."""

import gc
import threading
import time
from collections import namedtuple

import pytest

from harness.drive import RealClock
from harness.telemetry import host
from harness.telemetry.host import HostSource, ProcessSource
from harness.telemetry.sampler import Reading, Sampler, Source


class Fixed(Source):
    """Gives the same readings each time, after ``work``."""

    def __init__(self, *readings, work=lambda: None):
        self.readings, self.work = readings, work
        self.threads, self.closed = set(), 0

    def read(self):
        self.threads.add(threading.get_ident())
        self.work()
        return self.readings

    def close(self):
        self.closed += 1


def sampled(*sources, rate_hz, seconds):
    sampler = Sampler(sources, RealClock(), rate_hz)
    sampler.start()
    time.sleep(seconds)
    return sampler.stop(), sampler.cost


def test_a_field_that_was_never_answered_has_one_null():
    gpu = Fixed(Reading("gpu0", "power_w", None, "W"), Reading("gpu0", "temperature_c", 61.0, "C"))
    frame, cost = sampled(gpu, ProcessSource(), HostSource(), rate_hz=50.0, seconds=0.1)
    assert list(frame.columns) == ["t_s", "source", "name", "value", "unit"]
    assert frame[frame.name == "power_w"].value.isna().tolist() == [True]
    temperatures = frame[frame.name == "temperature_c"]
    assert len(temperatures) == cost.rounds >= 3
    assert temperatures.t_s.is_monotonic_increasing
    assert frame[frame.name == "resident_bytes"].value.min() > 1e6
    assert gpu.closed == 1


def test_a_field_that_failed_for_a_while_keeps_its_answers():
    answers = iter([None, 5.0, None, 6.0])
    source = Fixed()
    source.read = lambda: [Reading("gpu0", "power_w", value, "W") for value in [next(answers, 7.0)]]
    frame, _ = sampled(source, rate_hz=100.0, seconds=0.1)
    assert frame.value.isna().tolist()[:5] == [True, False, True, False, False]
    assert frame.value.dropna().tolist()[:3] == [5.0, 6.0, 7.0]


def test_sampling_runs_off_the_measuring_thread_and_its_cost_is_told():
    """Work counts as CPU time, a wait for a driver only as time that rounds last."""

    def work():
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            pass
        time.sleep(0.01)

    source = Fixed(work=work)
    _, cost = sampled(source, rate_hz=20.0, seconds=0.3)
    assert threading.get_ident() not in source.threads
    assert 0.004 * cost.rounds <= cost.cpu_s < 0.009 * cost.rounds
    assert 0.014 <= cost.mean_round_s <= cost.max_round_s


def test_rounds_keep_to_the_grid_however_long_one_takes():
    begun = time.monotonic()
    _, cost = sampled(Fixed(work=lambda: time.sleep(0.06)), rate_hz=10.0, seconds=0.9)
    periods = (time.monotonic() - begun) / 0.1
    assert 0.75 * periods <= cost.rounds <= periods + 2  # 0.63, were the period added to each round


def test_rounds_that_a_slow_one_ran_over_are_left_out():
    pauses = iter([0.3])
    source = Fixed(work=lambda: time.sleep(next(pauses, 0.0)))
    begun = time.monotonic()
    _, cost = sampled(source, rate_hz=20.0, seconds=0.4)
    assert 3 <= cost.rounds <= (time.monotonic() - begun - 0.3) / 0.05 + 3  # 8 or more, were they caught up


def test_an_error_of_a_source_costs_readings_and_is_told_but_not_raised():
    def fail():
        raise OSError("no such sensor")

    other = Fixed()
    sampler = Sampler([Fixed(work=fail), other], RealClock(), 50.0)
    sampler.start()
    time.sleep(0.02)
    assert sampler.stop().empty and sampler.error == "OSError: no such sensor"
    assert other.closed == 1


def test_collections_are_timed_from_the_first_reading_on():
    def pauses(source):
        return [r.value for r in source.read() if r.name == "gc_pause_s"]

    callbacks = list(gc.callbacks)
    source = ProcessSource()
    cycles = [[] for _ in range(100_000)]
    gc.collect()
    assert pauses(source) == []
    gc.disable()
    try:
        assert pauses(source) == [0.0]
        begun = time.perf_counter()
        gc.collect()
        took = time.perf_counter() - begun
        (paused,) = pauses(source)
        assert 0.3 * took < paused <= took
        assert pauses(source) == [0.0]
    finally:
        gc.enable()
        source.close()
    assert gc.callbacks == callbacks
    assert len(cycles) == 100_000


def test_host_load_of_an_idle_and_of_a_busy_host(monkeypatch):
    """psutil's own shares never fall below 80 % busy on two CPUs over a tenth of a second: these are ours."""
    Times = namedtuple("Times", ["user", "system", "idle", "iowait", "steal"])
    for after, busy, steal in ((Times(10, 5, 100.4, 3, 1), 0.0, 0.0), (Times(10.1, 5, 100.2, 3, 1.1), 50.0, 25.0)):
        readings = iter([Times(10, 5, 100, 3, 1), after])
        monkeypatch.setattr(host.psutil, "cpu_times", lambda: next(readings))  # noqa: B023
        load = host.host_load()
        assert load["cpu_percent"] == pytest.approx(busy, abs=1e-6)
        assert load["steal_percent"] == pytest.approx(steal, abs=1e-6)


def test_the_first_reading_of_the_host_is_of_the_time_since_the_source_was_made_whichever_thread_reads(monkeypatch):
    Times = namedtuple("Times", ["user", "system", "idle", "iowait", "guest"])
    readings = iter([Times(10, 5, 100, 3, 0), Times(11, 5, 101, 5, 1), Times(11, 5, 101, 5, 1)])
    monkeypatch.setattr(host.psutil, "cpu_times", lambda: next(readings))
    source, seen = HostSource(), []

    def read():
        seen.append({r.name: r.value for r in source.read()}.get("cpu_percent"))

    for _ in range(2):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert seen == [25.0, None]  # 1 of 4 seconds (a guest's are the user's); no tick since, so nothing is known


def test_rate_must_be_positive():
    with pytest.raises(ValueError, match="rate_hz=0"):
        Sampler([], RealClock(), rate_hz=0)


def test_sampling_ends_with_its_block_even_if_that_raises():
    source = Fixed()
    sampler = Sampler([source], RealClock(), 100.0)
    with pytest.raises(ValueError, match="the drive failed"), sampler:
        raise ValueError("the drive failed")
    assert source.closed == 1 and not sampler._thread.is_alive()
    assert sampler.stop().empty and source.closed == 1
