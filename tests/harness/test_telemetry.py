"""Telemetry with a fake NVML library that answers, refuses and fails field by field."""

import time
from collections import namedtuple
from types import SimpleNamespace

import pytest

from harness.drive import RealClock
from harness.telemetry import host
from harness.telemetry.gpu import GpuSource
from harness.telemetry.host import HostSource, ProcessSource
from harness.telemetry.sampler import Reading, Sampler

ANSWERS = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93, memory=41),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=7_000_000_000),
    "nvmlDeviceGetPowerUsage": 312_500,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetCurrentClocksEventReasons": 4,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1)],
}


class FakeNvml:
    """Two GPUs; every function named in ``refused`` raises, as drivers do for what a device does not support."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, refused=()):
        self.refused = set(refused)

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def __getattr__(self, name):
        def call(*_):
            if name in self.refused:
                raise self.NVMLError(name)
            return ANSWERS[name]

        return call


def values(nvml):
    return {(r.source, r.name): r.value for r in GpuSource(nvml).read()}


def test_gpu_fields_and_units():
    read = values(FakeNvml())
    assert read["gpu0", "utilization_percent"] == 93
    assert read["gpu1", "power_w"] == 312.5
    assert read["gpu0", "energy_j"] == 5000.0
    assert read["gpu0", "sm_clock_hz"] == 1980e6
    assert read["gpu0", "other_processes"] == 1
    assert len(read) == 20


@pytest.mark.parametrize("function", sorted(ANSWERS))
def test_a_refused_field_is_null_and_the_others_stay(function):
    full, partial = values(FakeNvml()), values(FakeNvml({function}))
    missing = {key for key in full if partial[key] is None}
    assert missing
    assert all(partial[key] == full[key] for key in full if key not in missing)
    assert all(value is None for value in values(FakeNvml(ANSWERS)).values())


def test_sampler_drops_fields_that_never_answered_and_counts_its_cost():
    class Source:
        def read(self):
            return [Reading("gpu0", "power_w", None, "W"), Reading("gpu0", "temperature_c", 61.0, "C")]

    sampler = Sampler([Source(), ProcessSource(), HostSource()], RealClock(), rate_hz=50.0)
    sampler.start()
    time.sleep(0.1)
    frame = sampler.stop()
    assert "power_w" not in set(frame.name)
    assert set(frame.columns) == {"t_s", "source", "name", "value", "unit"}
    rounds = frame[frame.name == "temperature_c"]
    assert len(rounds) == sampler.cost.rounds >= 3
    assert rounds.t_s.is_monotonic_increasing
    assert frame[frame.name == "resident_bytes"].value.min() > 1e6
    assert 0 < sampler.cost.cpu_s < 0.1


def test_host_load_of_an_idle_and_of_a_busy_host(monkeypatch):
    """psutil's own shares never fall below 80 % busy on two CPUs over a tenth of a second: these are ours."""
    Times = namedtuple("Times", ["user", "system", "idle", "iowait", "steal"])
    for after, busy, steal in ((Times(10, 5, 100.4, 3, 1), 0.0, 0.0), (Times(10.1, 5, 100.2, 3, 1.1), 50.0, 25.0)):
        readings = iter([Times(10, 5, 100, 3, 1), after])
        monkeypatch.setattr(host.psutil, "cpu_times", lambda: next(readings))  # noqa: B023
        load = host.host_load()
        assert load["cpu_percent"] == pytest.approx(busy, abs=1e-6)
        assert load["steal_percent"] == pytest.approx(steal, abs=1e-6)


def test_rate_must_be_positive():
    with pytest.raises(ValueError, match="rate_hz=0"):
        Sampler([], RealClock(), rate_hz=0)
