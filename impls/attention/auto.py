"""Which attention backend `attention=auto` means on a device."""

from __future__ import annotations

import importlib.util

import torch

from impls import native


def resolve_attention(device: torch.device | str) -> str:
    """Name of the fastest option that runs on ``device``: triton on CUDA; on a CPU native where its kernels build."""
    if torch.device(device).type == "cuda":
        return "triton" if importlib.util.find_spec("triton") else "sdpa"
    return "native" if native.available() else "sdpa"
