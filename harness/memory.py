"""Peak memory of the timed window, not of loading the weights."""

from __future__ import annotations

from pathlib import Path

import torch


class PeakMemory:
    """Reset before the window, read after it. CPU: peak resident set (Linux); CUDA: the allocator's peak."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._reset_worked = False

    def reset(self) -> None:
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._reset_worked = True
        except OSError:
            self._reset_worked = False  # not Linux, or not allowed: there is no peak to read

    def read(self) -> int | None:
        """Bytes, or None where the system cannot tell the window's peak."""
        if self._device == "cuda":
            return int(torch.cuda.max_memory_allocated())
        if not self._reset_worked:
            return None
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None
