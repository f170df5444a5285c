"""Where and on what a figure was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

from harness.probe import device_name

PACKAGES = ("torch", "triton", "numpy", "pandas", "plotly", "hydra-core", "tokenizers", "safetensors")


def provenance(device: str, kernels: dict[str, str]) -> dict[str, Any]:
    """Commit, versions, hardware and start time; what cannot be learnt is null."""
    return {
        "git": git_state(Path(__file__).resolve().parent.parent),
        "versions": versions(),
        "hardware": hardware(device),
        "kernels": kernels,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def git_state(root: Path) -> dict[str, Any]:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    found["driver"] = driver_version()
    return found


def driver_version() -> str | None:
    """NVIDIA's; None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return str(version)


def hardware(device: str) -> dict[str, Any]:
    """The fingerprint that decides whether two records may be compared."""
    return {
        "device": device,
        "name": device_name(device),
        "cpu": device_name("cpu"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": torch.cuda.device_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
