"""The real binding over a fake NVML library: structures, their versions and GPM's buffers as the driver would see them.

A function that the library lacks is one that the driver is too old for.
"""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from harness.telemetry.devices import Device
from harness.telemetry.gpm import Gpm
from harness.telemetry.gpu import GpuSource

OK, NOT_SUPPORTED, NOT_FOUND, INVALID, WRONG_VERSION = 0, 3, 6, 2, 25


class Hopper:
    """What a driver of R535 does; references to C values arrive as `ctypes.byref` objects."""

    def __init__(self) -> None:
        self.samples: dict[int, int] = {}
        self.taken = 0

    def nvmlInitWithFlags(self, flags: int) -> int:
        return OK

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        return OK if uuid.value == b"GPU-x" else NOT_FOUND

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj.gpu, rates._obj.memory = 93, 41
        return OK

    def nvmlDeviceGetClockInfo(self, handle: Any, which: Any, clock: Any) -> int:
        clock._obj.value = {1: 1980, 2: 2619}[which.value]
        return OK

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, energy: Any) -> int:
        energy._obj.value = 5_000_000
        return OK

    def nvmlDeviceGetPowerUsage(self, handle: Any, power: Any) -> int:
        return NOT_SUPPORTED

    def nvmlDeviceGetTemperatureV(self, handle: Any, temperature: Any) -> int:
        if temperature._obj.version != 0x1000000 + 12:
            return WRONG_VERSION
        temperature._obj.temperature = 61
        return OK

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> int:
        reasons._obj.value = 2**64 - 1
        return OK

    def nvmlGpmQueryDeviceSupport(self, handle: Any, support: Any) -> int:
        if support._obj.version != 1:
            return WRONG_VERSION
        support._obj.isSupportedDevice = 1
        return OK

    def nvmlGpmSampleAlloc(self, sample: Any) -> int:
        sample._obj.contents = pynvml.struct_c_nvmlGpmSample_t()
        self.samples[self._address(sample._obj)] = 0
        return OK

    def nvmlGpmSampleFree(self, sample: Any) -> int:
        return OK if self.samples.pop(self._address(sample), None) is not None else INVALID

    def nvmlGpmSampleGet(self, handle: Any, sample: Any) -> int:
        self.taken += 1
        self.samples[self._address(sample)] = self.taken
        return OK

    def nvmlGpmMetricsGet(self, question: Any) -> int:
        asked = question._obj
        first, second = (self.samples[self._address(sample)] for sample in (asked.sample1, asked.sample2))
        if asked.version != 1 or not 0 < first < second == self.taken:
            return INVALID
        for metric in asked.metrics[: asked.numMetrics]:
            metric.nvmlReturn = NOT_SUPPORTED if metric.metricId == 3 else OK
            metric.value = metric.metricId + 0.5
        return OK

    @staticmethod
    def _address(sample: Any) -> int:
        return pynvml.addressof(sample.contents)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    library = Hopper()
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return library


def test_what_the_driver_answers_arrives_and_what_it_lacks_is_null(driver: Hopper) -> None:
    source = GpuSource(pynvml, {0: "x", 1: "unknown"}, {})
    read = {(r.source, r.name): r.value for r in source.read()}
    assert {gpu for gpu, _ in read} == {"gpu0"}
    answered = {name: value for (_, name), value in read.items() if value is not None}
    assert answered == {
        "utilization_percent": 93.0,
        "memory_busy_percent": 41.0,
        "sm_clock_hz": 1980e6,
        "memory_clock_hz": 2619e6,
        "energy_j": 5000.0,
        "temperature_c": 61.0,
    }
    assert {name for (_, name) in read if read["gpu0", name] is None} == {
        "memory_used_bytes",  # no such function
        "power_w",  # not supported
        "throttle_reasons",  # N/A, under the old name
        "other_processes",  # the binding's own error of a mismatch
    }


def test_gpm_in_the_drivers_terms(driver: Hopper) -> None:
    handle = pynvml.nvmlDeviceGetHandleByUUID("GPU-x")
    device = Device(handle, handle)
    assert Gpm.supports(pynvml, device)
    ticks = iter([0.0, 1.0, 2.0])
    gpm = Gpm(pynvml, device, lambda: next(ticks))
    assert gpm.read() == {}
    for _ in range(2):
        assert gpm.read() == {
            "sm_active_percent": 2.5,
            "sm_occupancy_percent": None,
            "tensor_active_percent": 5.5,
            "dram_active_percent": 10.5,
            "pcie_sent_bytes_per_s": 20.5 * 2**20,
            "pcie_received_bytes_per_s": 21.5 * 2**20,
        }
    gpm.close()
    assert driver.samples == {}
