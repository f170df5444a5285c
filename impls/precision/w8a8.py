"""What INT8 and FP8 share: 8-bit weights and activations, quantise -> multiply -> rescale, the LM head left in BF16."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from impls.gpu import why_no_triton
from impls.precision.bf16 import Bf16
from impls.seams import Arm, LinearMethod, PackedLinear
from impls.seams.precision import Stage

SMALLEST_SCALE = 1e-12  # an all-zero row must quantise to zeros, not to NaN
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
UNFUSED = "_unfused"  # of a kernel's name: on CUDA, where operator after operator surrounds the product


class W8A8(LinearMethod):
    """`apply` is the three stages below, one after the other; where a kernel fuses them the result is the same.

    `stages` gives them one by one, so that the product can be timed apart from the scaling, which at few rows costs as
    much. Scales are those of whole rows, so that the order of a model's channels changes no rounding.
    """

    fused: ModuleType | None = None  # `triton_rows`, where a device runs it and the method's scales are those of rows

    def __init__(self, device: torch.device, permutation_seed: int | None = 0) -> None:
        super().__init__(device)
        self.permutation_seed = permutation_seed
        self._head = Bf16(device)
        self.activation_dtype = self._head.activation_dtype

    @classmethod
    def weight_bits(cls, options: Mapping[str, Any]) -> float:
        return 8.0

    @abstractmethod
    def quantize_activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, K] to 8-bit values [rows, K] and their FP32 scales, broadcastable to [rows, 1]."""

    @abstractmethod
    def matmul(self, values: Tensor, packed: PackedLinear) -> Tensor:
        """Quantised activations times quantised weights, [rows, N], without any scale."""

    def rescale(self, products: Tensor, scale: Tensor, packed: PackedLinear) -> Tensor:
        """Products back to real numbers (scales and bias applied in FP32), [rows, N] in ``activation_dtype``."""
        if self.fused is not None and not torch.compiler.is_compiling():
            weight_scale = packed.tensors["scale"]
            fused: Tensor = self.fused.rescale_rows(products, scale, weight_scale, packed.bias, self.activation_dtype)
            return fused
        y = products.float().mul_(scale).mul_(packed.tensors["scale"])
        if packed.bias is not None:
            y.add_(packed.bias)
        return y.to(self.activation_dtype)

    def stages(self) -> Mapping[str, Stage]:
        return {
            "quantize": lambda x, packed: self.quantize_activations(x),
            "matmul": lambda quantized, packed: (self.matmul(quantized[0], packed), quantized[1]),
            "rescale": lambda multiplied, packed: self.rescale(multiplied[0], multiplied[1], packed),
        }

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if not x.shape[0]:
            return x.new_empty(0, packed.out_features)
        values, scale = self.quantize_activations(x)
        return self.rescale(self.matmul(values, packed), scale, packed)

    def head_method(self) -> LinearMethod:
        return self._head


def row_kernels(device: torch.device) -> ModuleType | None:
    """The kernels around a product, None where they do not run. `torch.compile` fuses the plain operators itself.

    Imported when it is used: the package exists on few CPU-only machines, and reads its settings then.
    """
    if device.type != "cuda" or why_no_triton(device):
        return None
    from impls.precision import triton_rows

    return triton_rows


def symmetric_scale(x: Tensor, largest: float, dim: int | None) -> Tensor:
    """FP32 scales that map the largest magnitude (along ``dim``; of the whole tensor if None) to ``largest``."""
    peak = x.abs().amax() if dim is None else x.abs().amax(dim=dim, keepdim=True)
    return peak.float().div(largest).clamp_min(SMALLEST_SCALE)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x as INT8 in -127..127 (symmetric, so -128 stays unused) and FP32 scales [rows, 1]."""
    scale = symmetric_scale(x, LARGEST[torch.int8], dim=1)
    return x.float().div(scale).round_().clamp_(-127, 127).to(torch.int8), scale


def round_to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale as E4M3. Clamped first: the cast does not saturate, it gives NaN past 464."""
    return x.float().div(scale).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)


def linear_sizes(arm: Arm) -> dict[str, int]:
    """The feature counts of a layer's projections: what a kernel's alignment rules apply to."""
    shape = arm.model
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_heads * head_dim": shape.num_heads * shape.head_dim,
        "num_kv_heads * head_dim": shape.num_kv_heads * shape.head_dim,
    }
