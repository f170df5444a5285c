"""What this machine really achieves: a short probe, kept for a month, so that MFU and MBU mean something."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness.limits import Peaks, datasheet_peaks, memory_total_bytes
from harness.probe_sizes import copy_bytes, gemm_sizes
from impls.models.packed_cache import code_version
from impls.seams import LinearMethod

VERSION = 3  # of what is measured and how: 1 read memory where 2 copies it; 3 copies more than any cache holds
MAX_AGE_S = 30 * 24 * 3600.0
PROBE_S = 0.35
FREE_SHARE = 0.75  # of the processors' time
ATTEMPTS = 3
GPU_CALLS = 20  # before the host waits for them: a launch and a wait take tens of microseconds

# Seconds that a piece of work takes at best on a device.
Seconds = Callable[[Callable[[], object], str], float]


@dataclass(frozen=True)
class Rate:
    """A best rate per second. ``undisturbed``: nobody else held the processors while it was measured."""

    per_s: float
    undisturbed: bool


def peaks(device: str, method: LinearMethod, cache_dir: Path) -> Peaks:
    """Datasheet figures where the device is known, else measured (labelled so) and kept in ``cache_dir``.

    The GEMM rate is that of the arm's own ``method``: what its layers could reach at best, in their arithmetic; the
    bandwidth is the same for all methods. Each is measured again after `MAX_AGE_S`, or where what is kept cannot be
    read, and is of this machine, number of threads, version of torch and of the probe; the GEMM of the kernels' code
    too. What is measured while others hold the processors is not kept, and says so.
    """
    if device == "cuda":
        known = datasheet_peaks(device_name(device), method.arithmetic)
        if known is not None:
            return known
    threads = torch.get_num_threads()
    on_host = device != "cuda"
    # A layer may be multiplied by fewer threads than there are; a copy is shared by all.
    gemm = kept_rate(partial(gemm_flops_per_s, device, method), gemm_key(device, method), cache_dir, int(on_host))
    copy = kept_rate(partial(copy_bytes_per_s, device), machine_key(device), cache_dir, threads if on_host else 0)
    quiet = gemm.undisturbed and copy.undisturbed
    return Peaks(gemm.per_s, copy.per_s, "measured" if quiet else "measured, on a busy host")


def machine_key(device: str) -> dict[str, Any]:
    """All that a bandwidth depends on, as plain data."""
    return {
        "version": VERSION,
        "device": device,
        "name": device_name(device),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "memory": memory_total_bytes("cpu"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def gemm_key(device: str, method: LinearMethod) -> dict[str, Any]:
    """All that a GEMM rate depends on."""
    options = {name: value for name, value in sorted(vars(method).items()) if isinstance(value, str | int | float)}
    return {
        **machine_key(device),
        "code": code_version(),
        "method": type(method).__name__,
        "options": options | {"kernel": method.kernel, "activations": str(method.activation_dtype)},
    }


def kept_rate(measure: Callable[[], float], key: Mapping[str, Any], cache_dir: Path, threads: int) -> Rate:
    """What was kept under ``key``; else the best of up to `ATTEMPTS`, until one is undisturbed and kept.

    threads: how many processors ``measure`` keeps busy at least; 0: what it measures is not theirs.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir / f"peak-{digest}.json"
    kept = _kept(path, key)
    if kept is not None:
        return Rate(kept, True)
    best = 0.0
    for _ in range(ATTEMPTS):
        begun, spent = time.perf_counter(), time.process_time()
        best = max(best, measure())
        if undisturbed(time.process_time() - spent, time.perf_counter() - begun, threads):
            _keep(path, key, best)
            return Rate(best, True)
    return Rate(best, False)


def undisturbed(cpu_s: float, wall_s: float, threads: int) -> bool:
    """Whether so many threads had their processors to themselves."""
    return cpu_s >= FREE_SHARE * threads * wall_s


def _kept(path: Path, key: Mapping[str, Any]) -> float | None:
    """What an earlier probe measured; None if nothing is there, or nothing to rely on."""
    try:
        values = json.loads(path.read_text("utf-8"))
        per_s, age_s = float(values["per_s"]), time.time() - float(values["measured_at"])
        usable = 0 < per_s < math.inf and 0 <= age_s < MAX_AGE_S and values["key"] == key
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return per_s if usable else None


def _keep(path: Path, key: Mapping[str, Any], per_s: float) -> None:
    with suppress(OSError):  # no place to keep it: the next trial measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"per_s": per_s, "measured_at": time.time(), "key": key}), "utf-8")
        temporary.replace(path)


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name(torch.cuda.current_device())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def best_seconds(work: Callable[[], object], device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """The best of many runs over at least a third of a second, after one that is not timed: kernels may be built in
    it. On a GPU a run is one of `GPU_CALLS` that are queued at once.
    """
    calls = GPU_CALLS if device == "cuda" else 1

    def seconds(calls: int) -> float:
        start = clock()
        for _ in range(calls):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    seconds(1)
    best, begun = math.inf, clock()
    while clock() - begun < PROBE_S:
        best = min(best, seconds(calls) / calls)
    return best


@torch.inference_mode()
def gemm_flops_per_s(device: str, method: LinearMethod, seconds: Seconds = best_seconds) -> float:
    """A square layer over many rows, multiplied as the arm multiplies its own; a multiply-add is two."""
    rows, size = gemm_sizes(device)
    generator = torch.Generator().manual_seed(0)
    packed = method.pack(method.example(torch.randn(size, size, generator=generator) / size**0.5))
    x = torch.randn(rows, size, generator=generator).to(device, method.activation_dtype)
    return 2 * rows * size**2 / seconds(partial(method.apply, x, packed), device)


def copy_bytes_per_s(device: str, seconds: Seconds = best_seconds) -> float:
    """Bytes read and bytes written while one tensor is copied into another, in the memory of the device."""
    size = copy_bytes(device)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)  # untouched pages would be read from none
    target = torch.empty_like(source)
    return 2 * size / seconds(partial(target.copy_, source), device)
