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


def peaks(device: str, precision: str, cache_dir: Path) -> Peaks:
    """Datasheet figures where the device is known, else measured (labelled so) and kept in ``cache_dir``."""
    if device == "cuda":
        known = datasheet_peaks(torch.cuda.get_device_name(0), precision)
        if known is not None:
            return known
    name, threads = device_name(device), torch.get_num_threads()
    key = {"device": device, "name": name, "threads": threads, "torch": torch.__version__}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir / f"peaks-{digest}.json"
    if not path.exists():
        measured = {"flops_per_s": _gemm_flops_per_s(device), "bytes_per_s": _read_bytes_per_s(device), **key}
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


def _best_seconds(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _gemm_flops_per_s(device: str) -> float:
    """The best of FP32 and BF16 at 1024^3: the fastest arithmetic that a dense layer could use here."""
    n = 1024
    best = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(n, n, device=device).to(dtype)
        a @ a
        best = max(best, 2 * n**3 / _best_seconds(partial(torch.mm, a, a), device, 2))
    return best


def _read_bytes_per_s(device: str) -> float:
    """Reading 256 MiB, more than any last-level cache: what streaming the weights once a step is bound by."""
    data = torch.ones(64 * 2**20, device=device)
    data.sum()
    return data.numel() * 4 / _best_seconds(lambda: data.sum(), device)
