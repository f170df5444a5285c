"""Readings of this process and of the host, through psutil."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from harness.telemetry.sampler import Reading


class ProcessSource:
    """Resident memory and CPU use of this process. 100 % is one core."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()

    def read(self) -> Sequence[Reading]:
        with self._process.oneshot():
            return (
                Reading("process", "resident_bytes", float(self._process.memory_info().rss), "B"),
                Reading("process", "cpu_percent", self._process.cpu_percent(), "%"),
            )


class HostSource:
    """CPU use of the whole host (100 % is every core), its load average and its available memory."""

    def __init__(self) -> None:
        psutil.cpu_percent()

    def read(self) -> Sequence[Reading]:
        return (
            Reading("host", "cpu_percent", psutil.cpu_percent(), "%"),
            Reading("host", "load_1m", psutil.getloadavg()[0], "1"),
            Reading("host", "available_bytes", float(psutil.virtual_memory().available), "B"),
        )


def host_load() -> dict[str, float]:
    """For the provenance: what the host was doing just now. ``steal_percent`` is null where the kernel has none."""
    times = psutil.cpu_times_percent(interval=0.1)
    load = {"load_1m": psutil.getloadavg()[0], "cpu_percent": 100.0 - times.idle}
    if hasattr(times, "steal"):
        load["steal_percent"] = times.steal
    return load
