"""GPU performance monitoring (Hopper and newer): how busy the SMs, tensor cores and DRAM were between two samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from harness.telemetry.devices import Device

MIN_INTERVAL_S = 0.1  # NVML renews the counters no faster; samples taken closer together give no figure


class Metric(NamedTuple):
    """A reading's name and ``unit``; ``constant``: NVML's name of it, whose values are multiplied by ``scale``."""

    name: str
    constant: str
    unit: str
    scale: float


METRICS = (
    Metric("sm_active_percent", "NVML_GPM_METRIC_SM_UTIL", "%", 1.0),
    Metric("sm_occupancy_percent", "NVML_GPM_METRIC_SM_OCCUPANCY", "%", 1.0),
    Metric("tensor_active_percent", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", "%", 1.0),
    Metric("dram_active_percent", "NVML_GPM_METRIC_DRAM_BW_UTIL", "%", 1.0),
    Metric("pcie_sent_bytes_per_s", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", "B/s", 2.0**20),
    Metric("pcie_received_bytes_per_s", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", "B/s", 2.0**20),
)
UNKNOWN: dict[str, float | None] = {metric.name: None for metric in METRICS}


class Gpm:
    """The metrics of one device, each a mean since the previous reading. Check `supports` first.

    Errors: NVMLError when a sample cannot be allocated.
    """

    def __init__(self, nvml: Any, device: Device, now: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._device, self._now = nvml, device, now
        self._taken_s = -math.inf
        self._has_previous = False
        self._previous, self._latest = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._question = nvml.c_nvmlGpmMetricsGet_t()
        self._question.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._question.numMetrics = len(METRICS)
        for asked, metric in zip(self._question.metrics, METRICS, strict=False):  # the array has room for all there are
            asked.metricId = getattr(nvml, metric.constant)

    @staticmethod
    def supports(nvml: Any, device: Device) -> bool:
        """False as well where driver or GPU do not know the question."""
        try:
            return bool(nvml.nvmlGpmQueryDeviceSupport(device.gpu).isSupportedDevice)
        except nvml.NVMLError:
            return False  # an older driver, or a GPU that does not even know the question

    def read(self) -> dict[str, float | None]:
        """By name of `METRICS`; None for what is refused. Empty while less than `MIN_INTERVAL_S` has passed."""
        now = self._now()
        if now - self._taken_s <= MIN_INTERVAL_S:
            return {}
        self._taken_s = now
        nvml = self._nvml
        try:
            self._sample()
            had_previous, self._has_previous = self._has_previous, True
            self._previous, self._latest = self._latest, self._previous
            if not had_previous:
                return {}
            # Swapped already, so that the one just taken is the next reading's previous.
            self._question.sample1, self._question.sample2 = self._latest, self._previous
            nvml.nvmlGpmMetricsGet(self._question)
        except nvml.NVMLError:
            return dict(UNKNOWN)
        return {
            metric.name: answer.value * metric.scale
            if answer.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(answer.value)
            else None
            for metric, answer in zip(METRICS, self._question.metrics, strict=False)
        }

    def close(self) -> None:
        for sample in (self._previous, self._latest):
            self._nvml.nvmlGpmSampleFree(sample)

    def _sample(self) -> None:
        nvml, device = self._nvml, self._device
        if device.gpu_instance is None:
            nvml.nvmlGpmSampleGet(device.handle, self._latest)
        else:
            nvml.nvmlGpmMigSampleGet(device.gpu, device.gpu_instance, self._latest)
