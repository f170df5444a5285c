"""Readings of this process and of the host, through psutil."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from harness.telemetry.sampler import Reading, Source


class ProcessSource(Source):
    """Resident memory, CPU use (100 % is one core) and garbage-collection pauses of this process; of its ``workers``
    (process ids) memory and CPU use are added, a page that several look at once for each.

    ``gc_pause_s`` is the length of all pauses since the previous reading. Automatic collection is off while a trial is
    measured; a library may still collect (capturing a CUDA graph does), and then no thread runs.
    """

    def __init__(self, workers: Sequence[int] = ()) -> None:
        self._processes = [psutil.Process(), *map(psutil.Process, workers)]
        for process in self._processes:
            process.cpu_percent()
        self._paused_s = self._began_s = 0.0
        self._told_s: float | None = None
        gc.callbacks.append(self._on_collection)

    def read(self) -> Sequence[Reading]:
        resident = percent = 0.0
        for process in self._processes:
            with suppress(psutil.NoSuchProcess), process.oneshot():  # a worker that has died uses nothing
                resident += process.memory_info().rss
                percent += process.cpu_percent()
        readings = [
            Reading("process", "resident_bytes", resident, "B"),
            Reading("process", "cpu_percent", percent, "%"),
        ]
        paused = self._paused_s
        if self._told_s is not None:  # what was collected before the first reading is no part of the trial
            readings.append(Reading("process", "gc_pause_s", paused - self._told_s, "s"))
        self._told_s = paused
        return readings

    def close(self) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self._paused_s += time.perf_counter() - self._began_s


class HostSource(Source):
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
    before = psutil.cpu_times()
    time.sleep(0.2)
    spent = [now - then for now, then in zip(psutil.cpu_times(), before, strict=True)]
    share = dict(zip(before._fields, spent, strict=True))
    total = sum(spent) or 1.0  # the kernel counts in ticks: 0.2 s may hold none on an idle virtual machine
    idle = share["idle"] + share.get("iowait", 0.0)
    load = {"load_1m": psutil.getloadavg()[0], "cpu_percent": 100.0 * (1.0 - idle / total) if sum(spent) else 0.0}
    if "steal" in share:
        load["steal_percent"] = 100.0 * share["steal"] / total
    return load
