"""Whether a GPU runs the project's own kernels."""

from __future__ import annotations

import importlib.util

import torch


def compute_capability(device: torch.device) -> tuple[int, int]:
    """The highest where there is no GPU: then it is not the capability that is missing."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (99, 0)


def why_no_bf16(device: torch.device) -> str | None:
    """Why BF16 cannot be multiplied on tensor cores there; None if it can."""
    if compute_capability(device) < (8, 0):
        return "needs compute capability 8.0, whose tensor cores multiply BF16"
    return None


def why_no_triton(device: torch.device) -> str | None:
    """Why kernels in Triton cannot run there; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    return why_no_bf16(device)
