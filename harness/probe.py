"""What this machine really achieves: a short probe, once a machine, so that MFU and MBU mean something."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from harness.limits import Peaks, datasheet_peaks
from impls.seams import LinearMethod

PROBE_S = 0.35


def peaks(device: str, method: LinearMethod, cache_dir: Path) -> Peaks:
    """Datasheet figures where the device is known, else measured (labelled so) and kept in ``cache_dir``.

    The GEMM rate is that of the arm's own ``method``: what its layers could reach at best, in their arithmetic.
    """
    if device == "cuda":
        known = datasheet_peaks(torch.cuda.get_device_name(0), method.arithmetic)
        if known is not None:
            return known
    name, threads = device_name(device), torch.get_num_threads()
    key = {"device": device, "name": name, "threads": threads, "torch": torch.__version__, "kernel": method.kernel}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir / f"peaks-{digest}.json"
    if not path.exists():
        measured = {"flops_per_s": _gemm_flops_per_s(device, method), "bytes_per_s": _read_bytes_per_s(device), **key}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(measured))
        temporary.replace(path)
    values = json.loads(path.read_text())
    return Peaks(values["flops_per_s"], values["bytes_per_s"], "measured")


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name(0)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _best_seconds(work: Callable[[], object], device: str) -> float:
    """The best of many runs over at least a third of a second: one that nothing else disturbed."""
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < PROBE_S:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


@torch.inference_mode()
def _gemm_flops_per_s(device: str, method: LinearMethod) -> float:
    """A layer of 1024 x 1024 over 512 rows, multiplied as the arm multiplies its own."""
    n, rows = 1024, 512
    generator = torch.Generator().manual_seed(0)
    packed = method.pack(torch.randn(n, n, generator=generator) / n**0.5)
    x = torch.randn(rows, n, generator=generator).to(device, method.activation_dtype)
    return 2 * rows * n * n / _best_seconds(partial(method.apply, x, packed), device)


def _read_bytes_per_s(device: str) -> float:
    """Reading 256 MiB, more than any last-level cache: what streaming the weights once a step is bound by."""
    data = torch.ones(64 * 2**20, device=device)
    return data.numel() * 4 / _best_seconds(data.sum, device)
