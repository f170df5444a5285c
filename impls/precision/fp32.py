"""FP32 everywhere: the reference precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from impls.precision.gemm import linear_fp32
from impls.seams import LinearMethod, PackedLinear


class Fp32(LinearMethod):
    """Activations, weights and accumulators in FP32. On CUDA with TF32 off, which would cut products to 10 bits."""

    name = "fp32"
    arithmetic = "fp32"
    activation_dtype = torch.float32

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.kernel = "onednn_fp32" if device.type == "cpu" else "cublas_fp32"
        if device.type == "cuda":
            torch.set_float32_matmul_precision("highest")

    @classmethod
    def weight_bits(cls, options: Mapping[str, Any]) -> float:
        return 32.0

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """[N, K] FP32, kept as it is: oneDNN's own layout gained nothing measurable in FP32."""
        n, k = weight.shape
        weight = weight.to(self.device, torch.float32).contiguous()
        return PackedLinear(k, n, {"weight": weight}, None if bias is None else bias.to(self.device, torch.float32))

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return linear_fp32(x, packed.tensors["weight"], packed.bias)

    def dequantize(self, packed: PackedLinear) -> Tensor:
        return packed.tensors["weight"]

    def rows(self, packed: PackedLinear, ids: Tensor) -> Tensor | None:
        return F.embedding(ids, packed.tensors["weight"])
