"""GPTQ: one input is rounded at a time, its error passed on to the inputs not yet rounded (Frantar et al., 2023)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from impls.precision.grouped import GroupedWeight, asymmetric_grid, nearest
from impls.precision.weight_only import WeightOnly
from impls.seams import PackedLinear

BLOCK = 128  # inputs whose errors are gathered before they reach the rest of the matrix
DAMPING = 0.01  # of the mean of the Hessian's diagonal
CALIBRATION_TOKENS = 2048


class Gptq(WeightOnly):
    """The format and kernels of `Int4` (or 3, 2 bits); the levels are chosen for the layer's inputs on natural text.

    Inputs are taken in their order (no act-order); a group's grid is set when its first input is reached. Weights are
    quantised at the first start, which ``startup_s`` shows, and kept (`packed_cache`).
    """

    name, bits = "gptq", 4
    calibration_tokens = CALIBRATION_TOKENS

    def __init__(
        self,
        device: torch.device,
        bits: Literal[2, 3, 4] = 4,
        group_size: int | None = 64,
        head_bits: Literal[4, 8, 16] = 16,
        kernel: str = "auto",
        permutation_seed: int | None = 0,
    ) -> None:
        self.bits = bits
        super().__init__(device, group_size, head_bits, kernel, permutation_seed)

    def pack_calibrated(self, weight: Tensor, inputs: Tensor, bias: Tensor | None = None) -> PackedLinear:
        size = self.group_size or weight.shape[1]
        found = gptq(weight.float(), hessian(inputs), self.bits, size, self._gemm.scale_dtype)
        return self._gemm.pack(found, bias)


def hessian(inputs: Tensor) -> Tensor:
    """FP32 [K, K] of inputs [T, K]: of the squared error of a layer's outputs, a factor of two left out."""
    x = inputs.float().cpu()
    return x.T @ x / len(x)


def gptq(
    weight: Tensor, hessian: Tensor, bits: int, group_size: int, dtype: torch.dtype = torch.float16
) -> GroupedWeight:
    """FP32 [N, K] in groups along K, so that the layer's outputs (not its weights) come out as near as can be.

    hessian: FP32 [K, K] of the layer's inputs. ValueError if ``group_size`` does not divide K.
    """
    n, k = weight.shape
    if k % group_size:
        raise ValueError(f"group_size={group_size} does not divide in_features={k}")
    weight, hessian = weight.clone(), hessian.clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0  # an input that never occurs: any level is right
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    values = torch.empty(n, k, dtype=torch.uint8)
    scale, offset = (torch.empty(n, k // group_size) for _ in range(2))
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        block, errors = weight[:, start:stop].t().contiguous(), torch.empty(stop - start, n)  # inputs are rows here
        for i in range(start, stop):
            group = i // group_size
            if i % group_size == 0:
                reached = torch.cat((block[i - start :].t(), weight[:, stop:]), dim=1)[:, :group_size]
                scale[:, group], offset[:, group] = asymmetric_grid(reached, bits, dtype)
            row = block[i - start]
            level = nearest(row[:, None], scale[:, group], offset[:, group], bits)[:, 0]
            values[:, i] = level.to(torch.uint8)
            error = (row - (scale[:, group] * level + offset[:, group])) / inverse[i, i]
            block[i - start :].addr_(inverse[i, i:stop], error, alpha=-1)
            errors[i - start] = error
        weight[:, stop:] -= errors.t() @ inverse[start:stop, stop:]
    return GroupedWeight(values, scale, offset, bits)
