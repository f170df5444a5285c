"""Readings of this process and of the host, through psutil."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

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
        self._told = psutil.cpu_times()  # psutil.cpu_percent() begins anew, with 0, in each thread that asks

    def read(self) -> Sequence[Reading]:
        before, self._told = self._told, psutil.cpu_times()
        shares = cpu_shares(before, self._told)
        busy = [] if shares is None else [Reading("host", "cpu_percent", shares["busy"], "%")]
        return (
            *busy,
            Reading("host", "load_1m", psutil.getloadavg()[0], "1"),
            Reading("host", "available_bytes", float(psutil.virtual_memory().available), "B"),
        )


def host_load() -> dict[str, float]:
    """For the provenance: what the host was doing just now. ``steal_percent`` is null where the kernel has none."""
    before = psutil.cpu_times()
    time.sleep(0.2)
    shares = cpu_shares(before, psutil.cpu_times()) or {"busy": 0.0}  # no tick in 0.2 s: an idle virtual machine
    load = {"load_1m": psutil.getloadavg()[0], "cpu_percent": shares["busy"]}
    return load | ({"steal_percent": shares["steal"]} if "steal" in shares else {})


def cpu_shares(before: Any, now: Any) -> dict[str, float] | None:
    """Percent of all cores' time between two of psutil's `cpu_times`, by what the kernel counts, and ``busy``: all but
    idle time and waiting for a disk. None: the kernel counts in ticks, and there was none.
    """
    named = [name for name in before._fields if not name.startswith("guest")]  # these are part of user time
    spent = {name: max(0.0, getattr(now, name) - getattr(before, name)) for name in named}
    total = sum(spent.values())
    if total <= 0:
        return None
    shares = {name: 100.0 * seconds / total for name, seconds in spent.items()}
    return shares | {"busy": 100.0 - shares["idle"] - shares.get("iowait", 0.0)}
