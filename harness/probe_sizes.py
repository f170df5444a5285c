"""How much a probe of a device's best rates has to compute and to copy: enough to fill it, and no cache to hide in."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from harness.limits import memory_free_bytes

GEMM_ROWS, GEMM_SIZE = 512, 1024  # on a CPU
GPU_GEMM = 8192  # rows, and a layer's width either way: less does not fill a large GPU
GPU_GEMM_BYTES = 20  # that each of GPU_GEMM**2 elements takes at most: input, output, weights, these dequantised
COPIED_CACHES = 4  # as much as all last-level caches hold, so that little of a copy stays in them for the next one
COPY_BYTES, MOST_COPY_BYTES = 512 * 2**20, 2 * 2**30  # where the caches are not known; ever
FREE_PART = 4  # of the free memory, at most a quarter for what a probe allocates
CPUS = Path("/sys/devices/system/cpu")


def free_bytes(device: str) -> int:
    """Of the device that this process computes on, now."""
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else memory_free_bytes(device)


def last_level_bytes(device: str) -> int:
    """All last-level caches of the device together: a GPU's L2, a machine's L3; 0 where they are not known."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    sizes: dict[str, int] = {}  # by the processors that share it: each of them lists it
    for folder in CPUS.glob("cpu[0-9]*/cache/index[0-9]*"):
        with suppress(OSError, ValueError):  # a virtual machine may leave some of it out
            level, size, shared = ((folder / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
            if level == "3":
                sizes[shared] = int(size.removesuffix("K")) * 2**10
    return sum(sizes.values())


def copy_bytes(device: str) -> int:
    """Bytes to copy, in whole FP32 elements."""
    wanted = COPIED_CACHES * last_level_bytes(device) or COPY_BYTES
    fitting = free_bytes(device) // FREE_PART // 2  # there are two of them
    return min(wanted, MOST_COPY_BYTES, fitting) // 4 * 4


def gemm_sizes(device: str) -> tuple[int, int]:
    """Rows, and the width of a square layer."""
    if device != "cuda":
        return GEMM_ROWS, GEMM_SIZE
    size, fitting = GPU_GEMM, free_bytes(device) // FREE_PART
    while size > GEMM_SIZE and GPU_GEMM_BYTES * size**2 > fitting:
        size //= 2
    return size, size
