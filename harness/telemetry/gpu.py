"""NVML readings of each GPU. A field that a device refuses is null, for that device and that field alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from harness.telemetry.sampler import Reading


class GpuSource:
    """All NVIDIA GPUs of the host through ``nvml`` (the `pynvml` module, or a fake of it in tests)."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]

    def read(self) -> Sequence[Reading]:
        readings: list[Reading] = []
        for index, device in enumerate(self._devices):
            readings += [Reading(f"gpu{index}", *field) for field in self._fields(device)]
        return readings

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _fields(self, device: Any) -> Sequence[tuple[str, float | None, str]]:
        nvml, ask = self._nvml, self._ask
        return (
            ("utilization_percent", ask(lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu), "%"),
            ("memory_busy_percent", ask(lambda: nvml.nvmlDeviceGetUtilizationRates(device).memory), "%"),
            ("memory_used_bytes", ask(lambda: nvml.nvmlDeviceGetMemoryInfo(device).used), "B"),
            ("power_w", ask(lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3), "W"),
            ("energy_j", ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3), "J"),
            ("sm_clock_hz", ask(lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM) * 1e6), "Hz"),
            ("memory_clock_hz", ask(lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM) * 1e6), "Hz"),
            ("temperature_c", ask(lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)), "C"),
            ("throttle_reasons", ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(device)), "bits"),
            ("other_processes", ask(lambda: self._others(device)), "1"),
        )

    def _others(self, device: Any) -> int:
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(device)
        return sum(process.pid != os.getpid() for process in processes)

    def _ask(self, field: Callable[[], float]) -> float | None:
        try:
            return float(field())
        except self._nvml.NVMLError:
            return None  # the device, or this driver, does not support the field


def gpu_source() -> GpuSource | None:
    """The host's GPUs, or None where there is no NVML library or it finds no driver."""
    import pynvml

    try:
        return GpuSource(pynvml)
    except pynvml.NVMLError:
        return None
