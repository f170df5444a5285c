"""What lies between a layer's matrix products: one C call each where `impls.native` can, otherwise torch.

The C kernels take FP32 on the CPU. Under `torch.compile` these stay torch, whose operators Inductor fuses itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from impls import native


def elementwise_kernel(dtype: torch.dtype, device: torch.device) -> str:
    """What these operators are outside `torch.compile`, for the record: `native` or `torch`."""
    return "native" if dtype == torch.float32 and device.type == "cpu" and native.available() else "torch"


def _native(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and elementwise_kernel(x.dtype, x.device) == "native"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: [rows, K] and [K] to [rows, K] (Zhang and Sennrich, 2019)."""
    return native.rms_norm(x, weight, eps) if _native(x) else F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x += residual`` in place, then `rms_norm` of x; all [rows, K] but the weight [K]."""
    if _native(x):
        return native.add_rms_norm(x, residual, weight, eps)
    x += residual
    return F.rms_norm(x, weight.shape, weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's silu(gate) * up: [rows, 2 * K], gate first, to [rows, K] (Shazeer, 2020)."""
    if _native(gate_up):
        return native.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: x [T, heads, head_dim], tables [T, 1, head_dim] of `rope.rotary_tables`; FP32, in x's dtype."""
    if _native(x):
        return native.rotate(x, cos, sin)
    x32 = x.float()
    low, high = x32.chunk(2, -1)
    return torch.cat((high, low), -1).mul_(sin).addcmul_(x32, cos).to(x.dtype)
