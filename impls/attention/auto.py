"""Which attention backend `attention=auto` means on a device."""

from __future__ import annotations

import torch

from impls import native
from impls.gpu import why_no_triton


def resolve_attention(device: torch.device | str) -> str:
    """Name of the fastest option that runs on ``device``: triton on a GPU that it runs on; on a CPU native where its
    kernels build."""
    device = torch.device(device)
    if device.type == "cuda":
        return "sdpa" if why_no_triton(device) else "triton"
    return "native" if native.available() else "sdpa"
