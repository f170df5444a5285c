from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from harness.memory import PeakMemory


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs Linux and glibc"
)
def test_what_was_freed_before_the_window_is_no_part_of_its_peak() -> None:
    """Packing weights frees many small tensors, whose pages the allocator keeps for the next ones."""
    memory = PeakMemory("cpu")
    torch.ones(30 << 20, dtype=torch.uint8)  # freed at once: glibc takes tensors up to this size from its heap now
    loading = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(300)]
    weights = torch.ones(1 << 20, dtype=torch.uint8)  # above them: without it the heap would shrink by itself
    memory.reset()
    with_loading = memory.read()
    loading.clear()
    memory.reset()
    step = torch.ones(50 << 20, dtype=torch.uint8)
    peak = memory.read()
    assert with_loading is not None and peak is not None
    assert 200 << 20 < with_loading - peak < 300 << 20
    assert len(weights) + len(step) == 51 << 20
