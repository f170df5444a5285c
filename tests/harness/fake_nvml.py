"""A fake `pynvml` that answers, refuses and fails function by function.

It takes its constants, structures and errors from the real binding, and refuses a call that the binding does not have
or does not take, so a misspelt name fails here as it would on a GPU.
"""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pynvml

from harness.telemetry.gpm import METRICS
from harness.telemetry.gpu import GpuSource

A, B = "aaaaaaaa-0000-0000-0000-000000000000", "bbbbbbbb-0000-0000-0000-000000000000"
MIG = "cccccccc-0000-0000-0000-000000000000"
BOTH = {0: A, 1: B}
ULL, UINT = 2**64 - 1, 2**32 - 1
GPM_VALUES = {"NVML_GPM_METRIC_SM_UTIL": 71.5, "NVML_GPM_METRIC_PCIE_TX_PER_SEC": 3.0}
REFUSALS = ("NVMLError_NotSupported", "NVMLError_NoPermission", "NVMLError_NotFound", "NVMLError_GpuIsLost")
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93, memory=41),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=7_000_000_000),
    "nvmlDeviceGetPowerUsage": 312_500,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetTemperatureV": 62,
    "nvmlDeviceGetCurrentClocksEventReasons": 4,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 8,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)],
    "nvmlDeviceGetPcieThroughput": 2_500,
}
FIELDS = (
    *("utilization_percent", "memory_busy_percent", "memory_used_bytes", "power_w", "energy_j", "sm_clock_hz"),
    *("memory_clock_hz", "temperature_c", "throttle_reasons", "other_processes"),
    *(metric.name for metric in METRICS),
)


class FakeNvml:
    """Two GPUs. ``failures``: error class name by function, or by (function, handle); it answers ``answers`` besides.

    Handles are the UUIDs themselves, with their prefix. ``mig``: the UUIDs of the MIG instances of GPU `A`, by index.
    """

    def __init__(
        self,
        failures: Mapping[Any, str] | None = None,
        answers: Mapping[str, Any] | None = None,
        gpm: bool = False,
        mig: Mapping[int, str] | None = None,
    ) -> None:
        self.failures, self.answers = dict(failures or {}), {**ANSWERS, **(answers or {})}
        self.gpm, self.mig = gpm, dict(mig or {})
        self.open = self.sampled = 0
        self.allocated: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)  # AttributeError where the binding has no such name
        if not name.startswith("nvml"):
            return real

        def call(*arguments: Any) -> Any:
            inspect.signature(real).bind(*arguments)
            self.calls.append((name, *arguments))
            handle = arguments[0] if arguments and isinstance(arguments[0], str) else None
            failure = self.failures.get(name) or self.failures.get((name, handle))
            if failure:
                raise getattr(pynvml, failure)()
            special = getattr(self, f"_{name}", None)
            return special(*arguments) if special else self.answers[name]

        return call

    def _nvmlInit(self) -> None:
        self.open += 1

    def _nvmlShutdown(self) -> None:
        self.open -= 1

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (f"GPU-{A}", f"GPU-{B}", *(f"MIG-{u}" for u in self.mig.values())):
            raise pynvml.NVMLError_NotFound()
        return uuid

    def _nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [int(bool(self.mig) and handle == f"GPU-{A}"), 0]

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index not in self.mig:
            raise pynvml.NVMLError_NotFound()
        return f"MIG-{self.mig[index]}"

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return f"GPU-{A}"

    def _nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        return 40 + next(index for index, uuid in self.mig.items() if handle == f"MIG-{uuid}")

    def _nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self.gpm))

    def _nvmlGpmSampleAlloc(self) -> Any:
        sample = ctypes.cast(ctypes.create_string_buffer(8), pynvml.c_nvmlGpmSample_t)
        self.allocated.append(sample)
        return sample

    def _nvmlGpmSampleFree(self, sample: Any) -> None:
        self.allocated.remove(sample)

    def _take(self, sample: Any) -> None:
        self.sampled += 1
        ctypes.cast(sample, ctypes.POINTER(ctypes.c_int64))[0] = self.sampled

    def _nvmlGpmSampleGet(self, handle: str, sample: Any) -> None:
        self._take(sample)

    def _nvmlGpmMigSampleGet(self, handle: str, instance: int, sample: Any) -> None:
        self._take(sample)

    def _nvmlGpmMetricsGet(self, question: Any) -> None:
        assert question.version == 1
        first, second = (
            ctypes.cast(sample, ctypes.POINTER(ctypes.c_int64))[0] for sample in (question.sample1, question.sample2)
        )
        assert 0 < first < second == self.sampled
        known = {getattr(pynvml, name): value for name, value in self.answers.get("gpm", GPM_VALUES).items()}
        for metric in question.metrics[: question.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in known else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = known.get(metric.metricId, 0.0)


def source_of(nvml: FakeNvml, uuids: Mapping[int, str] = BOTH, environment: Mapping[str, str] | None = None) -> Any:
    return GpuSource(nvml, uuids, environment or {})


def values(nvml: FakeNvml, **arguments: Any) -> dict[tuple[str, str], float | None]:
    return {(r.source, r.name): r.value for r in source_of(nvml, **arguments).read()}
