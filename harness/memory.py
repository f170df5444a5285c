"""Peak memory of the timed window, not of loading the weights."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import torch

from impls.seams import Topology


class PeakMemory:
    """Reset before the window, read after it. CPU: peak resident set (Linux); CUDA: the allocator's peak.

    With ``workers`` the sum of their peaks and of this process's own. A page that several processes look at (libraries,
    keys and values that are handed over) counts in each of them: an upper bound.
    """

    def __init__(self, device: str, workers: Topology | None = None) -> None:
        self._device, self._workers = device, workers
        self._reset_worked = False

    def reset(self) -> None:
        worked = [reset_peak(None, self._device)] if self._counts_here() else []
        if self._workers is not None:
            worked += self._workers.call(partial(reset_peak, device=self._device))
        self._reset_worked = all(worked)

    def read(self) -> int | None:
        """Bytes, or None where the system cannot tell the window's peak, or a worker has died."""
        if not self._reset_worked or (self._workers is not None and self._workers.deaths):
            return None
        found = [read_peak(None, self._device)] if self._counts_here() else []
        if self._workers is not None:
            found += self._workers.call(partial(read_peak, device=self._device))
        known = [peak for peak in found if peak is not None]
        return sum(known) if len(known) == len(found) else None

    def _counts_here(self) -> bool:
        """Beside workers on a GPU this process has no memory there, and is not to open a context only to ask."""
        return self._workers is None or self._device != "cuda"


def reset_peak(engine: Any, device: str) -> bool:
    """Of the process that runs ``engine``: False where there will be no peak to read (not Linux, or not allowed)."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return True
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps what packing the weights took and freed
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def read_peak(engine: Any, device: str) -> int | None:
    """Bytes, of the process that runs ``engine``, since its `reset_peak`."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
