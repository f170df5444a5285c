"""W4A8: four-bit weights by group, and activations rounded to INT8 as they are multiplied, a scale for each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from impls import native
from impls.precision.grouped_gemm import why_not
from impls.precision.w8a8 import quantize_int8, row_kernels
from impls.precision.weight_only import Int4, as_groups
from impls.seams import Arm, PackedLinear

# And the kernel of `GroupedGemm` whose layout each reads.
KERNELS = {"native_w4a8": "native_grouped", "triton_w4a8": "triton_grouped", "dequantized": "dequantized"}


class W4A8(Int4):
    """The weights of `Int4`, byte for byte; activations as `Int8` rounds them, token by token.

    native_w4a8  a CPU with a C compiler: integer products (VNNI, or the 8-bit multiply-add of AVX2), summed exactly
                 within a group, in FP32 from group to group
    triton_w4a8  CUDA: the same integer products on tensor cores, by the kernel of triton_grouped
    dequantized  any device: the weights made dense for every product and multiplied by the activations' integers in
                 floating point; emulated
    """

    name = "w4a8"

    def __init__(
        self,
        device: torch.device,
        group_size: int | None = 64,
        head_bits: Literal[4, 8, 16] = 16,
        kernel: str = "auto",
        permutation_seed: int | None = 0,
    ) -> None:
        kernel = best_kernel(device) if kernel == "auto" else kernel
        if why := why_no_kernel(kernel, device):
            raise ValueError(why)
        super().__init__(device, group_size, head_bits, KERNELS[kernel], permutation_seed)
        self.kernel = kernel
        self._rows = row_kernels(device) if kernel == "triton_w4a8" else None
        if kernel == "dequantized":
            self.emulated = "INT8 activations are multiplied in floating point: no kernel for W4A8 here"

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        options = dict(arm.axes["precision"])
        kernel = str(options.pop("kernel", "auto"))
        why = None if kernel == "auto" else why_no_kernel(kernel, torch.device(arm.device))
        return super().validate(replace(arm, axes={**arm.axes, "precision": options})) + ([why] if why else [])

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        n, tensors = packed.out_features, packed.tensors
        if not x.shape[0]:
            return x.new_empty(0, n)
        if self.kernel == "native_w4a8":
            size = as_groups(packed).group_size
            return native.linear_w4a8(
                x.contiguous(), tensors["weight"], tensors["scale"], n, group_size=size, bias=packed.bias
            )
        values: Tensor
        scale: Tensor
        if self._rows is not None and not torch.compiler.is_compiling():
            values, scale = self._rows.quantize_rows(x, torch.int8)
        else:
            values, scale = quantize_int8(x)
        if self.kernel == "triton_w4a8":
            return self._gemm.matmul(values, as_groups(packed), scale.view(-1))
        unscaled = self._gemm.matmul(values.to(self._gemm.dtype), as_groups(replace(packed, bias=None)))
        y = unscaled.float() * scale
        return (y if packed.bias is None else y + packed.bias.float()).to(self.activation_dtype)


def best_kernel(device: torch.device) -> str:
    """The first of `KERNELS` that can run here."""
    return next(kernel for kernel in KERNELS if why_no_kernel(kernel, device) is None)


def why_no_kernel(kernel: str, device: torch.device) -> str | None:
    """Why ``kernel`` cannot run on ``device``; None if it can."""
    if kernel not in KERNELS:
        return f"kernel={kernel}: must be auto or one of {', '.join(KERNELS)}"
    why = why_not(KERNELS[kernel], device, 4, False)
    return why and why.replace(KERNELS[kernel], kernel)
