"""A linear layer with a gradient, by oneDNN on a CPU: several times the speed of torch's own on some."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from impls.precision.gemm import linear_fp32


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear_fp32(x.contiguous(), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = linear_fp32(grad, weight.t().contiguous()) if ctx.needs_input_grad[0] else None
        of_weight = linear_fp32(grad.t().contiguous(), x.t().contiguous()) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] transposed."""
    out: Tensor = _Linear.apply(x, weight)
    return out
