"""Which attention backend `attention=auto` means on a device."""

from __future__ import annotations

import importlib
import importlib.util

import torch


def resolve_attention(device: torch.device | str) -> str:
    """Name of the fastest option that runs on ``device``: triton on CUDA; on a CPU native where its kernels build."""
    if torch.device(device).type == "cuda":
        return "triton" if importlib.util.find_spec("triton") else "sdpa"
    return "native" if _native_available() else "sdpa"


def _native_available() -> bool:
    if importlib.util.find_spec("impls.native") is None:
        return False
    return bool(importlib.import_module("impls.native").available())
