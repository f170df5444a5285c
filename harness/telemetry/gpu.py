"""NVML readings of the GPUs that a trial runs on. What a device refuses is null: that field, of that device."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.telemetry.devices import Device, cuda_uuids, find_device
from harness.telemetry.gpm import METRICS, UNKNOWN, Gpm
from harness.telemetry.sampler import Reading, Source


class GpuSource(Source):
    """The CUDA devices of ``uuids`` (by ordinal) through ``nvml``, the `pynvml` module or a fake of it in tests.

    processes: how many of our own compute on a device, by ordinal; 1 where it is not named.
    ``gpuN`` is CUDA's device N. On a MIG instance, memory, processes and activity are the instance's; clocks, their
    event reasons and the temperature are those of the GPU that it shares; power, energy, utilisation and PCIe traffic
    belong to the GPU as a whole, and are null. Errors: NVMLError without a driver.
    """

    def __init__(
        self,
        nvml: Any,
        uuids: Mapping[int, str],
        environment: Mapping[str, str] = os.environ,
        processes: Mapping[int, int] | None = None,
    ) -> None:
        self._nvml, self._processes = nvml, processes or {}
        # A driver too old for a function makes some of the binding's calls raise an error that is no NVMLError.
        self._refusals = (nvml.NVMLError, nvml.NVMLLibraryMismatchError)
        self._not_available = {nvml.NVML_VALUE_NOT_AVAILABLE_uint.value, nvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value}
        nvml.nvmlInit()
        self._devices: dict[int, Device] = {}
        self._gpm: dict[int, Gpm] = {}
        for ordinal, uuid in uuids.items():
            try:
                device = find_device(nvml, uuid, environment)
                if device is None:
                    continue
                self._devices[ordinal] = device
                if Gpm.supports(nvml, device):
                    self._gpm[ordinal] = Gpm(nvml, device)
            except nvml.NVMLError:
                continue  # one GPU that refuses leaves the others

    def read(self) -> Sequence[Reading]:
        """Every GPU's counters first, at the time that the round is stamped with: for its activity one may wait."""
        fields = [(i, field) for i, device in self._devices.items() for field in self._fields(i, device)]
        for ordinal, device in self._devices.items():
            fields += [(ordinal, field) for field in self._activity(ordinal, device)]
        return [Reading(f"gpu{ordinal}", *field) for ordinal, field in fields]

    def close(self) -> None:
        for gpm in self._gpm.values():
            gpm.close()
        self._nvml.nvmlShutdown()

    def _fields(self, ordinal: int, device: Device) -> Sequence[tuple[str, float | None, str]]:
        nvml, ask, one, gpu = self._nvml, self._ask, device.handle, device.gpu
        whole = self._ask if device.gpu_instance is None else _nothing
        return (
            ("utilization_percent", whole(lambda: nvml.nvmlDeviceGetUtilizationRates(one).gpu), "%"),
            ("memory_busy_percent", whole(lambda: nvml.nvmlDeviceGetUtilizationRates(one).memory), "%"),
            ("memory_used_bytes", ask(lambda: nvml.nvmlDeviceGetMemoryInfo(one).used), "B"),
            ("power_w", whole(lambda: nvml.nvmlDeviceGetPowerUsage(one), 1e-3), "W"),
            ("energy_j", whole(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(one), 1e-3), "J"),
            ("sm_clock_hz", ask(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM), 1e6), "Hz"),
            ("memory_clock_hz", ask(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM), 1e6), "Hz"),
            ("temperature_c", ask(lambda: self._temperature(gpu)), "C"),
            ("throttle_reasons", ask(lambda: self._throttle_reasons(gpu)), "bits"),
            ("other_processes", ask(lambda: self._others(ordinal, one)), "1"),
        )

    def _activity(self, ordinal: int, device: Device) -> Sequence[tuple[str, float | None, str]]:
        gpm = self._gpm.get(ordinal)
        values = gpm.read() if gpm else UNKNOWN | self._pcie(device)
        return [(metric.name, values[metric.name], metric.unit) for metric in METRICS if metric.name in values]

    def _pcie(self, device: Device) -> dict[str, float | None]:
        """Where GPM does not answer. Each of the two questions keeps this thread waiting for 20 ms (NVML)."""
        if device.gpu_instance is not None:
            return {}
        nvml, one = self._nvml, device.handle
        sent, received = nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES
        return {
            "pcie_sent_bytes_per_s": self._ask(lambda: nvml.nvmlDeviceGetPcieThroughput(one, sent), 1e3),
            "pcie_received_bytes_per_s": self._ask(lambda: nvml.nvmlDeviceGetPcieThroughput(one, received), 1e3),
        }

    def _temperature(self, gpu: Any) -> int:
        nvml = self._nvml
        try:
            return int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
        except nvml.NVMLError_FunctionNotFound:  # announced for CUDA 14's driver
            return int(nvml.nvmlDeviceGetTemperatureV(gpu, nvml.NVML_TEMPERATURE_GPU))

    def _throttle_reasons(self, gpu: Any) -> int:
        nvml = self._nvml
        try:
            return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
        except nvml.NVMLError_FunctionNotFound:  # a driver before 535 has the same bits under their old name
            return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))

    def _others(self, ordinal: int, device: Any) -> int | None:
        """Processes computing on the device beside our own, as far as NVML shows them to this container."""
        pids = {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(device)}
        if not pids:
            return None  # we compute there too: they are hidden, not absent
        # In a container some drivers tell the host's pids; ours are among those.
        return max(0, len(pids) - self._processes.get(ordinal, 1))

    def _ask(self, field: Callable[[], float | None], scale: float = 1.0) -> float | None:
        try:
            value = field()
        except self._refusals:
            return None  # the device, this driver or this user's rights do not give the field
        return None if value is None or value in self._not_available else value * scale


def _nothing(field: Callable[[], float | None], scale: float = 1.0) -> None:
    """What a MIG instance has no reading of its own for."""


def gpu_source(held: Sequence[Mapping[int, str]] | None = None) -> GpuSource | None:
    """The GPUs on which our processes hold memory; None where there is no NVML library or it finds no driver.

    held: as `cuda_uuids` gives it, of each process; None: of this one.
    """
    import pynvml

    held = [cuda_uuids()] if held is None else held
    uuids = {ordinal: uuid for one in held for ordinal, uuid in one.items()}
    try:
        return GpuSource(pynvml, uuids, processes=Counter(ordinal for one in held for ordinal in one))
    except pynvml.NVMLError:
        return None
