"""BF16 weights: what serving engines deploy by default."""

from __future__ import annotations

import torch
from torch import Tensor

from impls.precision.gemm import Bf16Gemm, why_not
from impls.seams import Arm, LinearMethod, PackedLinear


class Bf16(LinearMethod):
    """Weights in BF16, accumulators in FP32.

    Activations between layers are BF16 on CUDA and on CPUs that multiply BF16; elsewhere they stay FP32, because
    rounding them would cost time and save none. `Bf16Gemm` lists the kernels; ``kernel`` forces one.
    """

    name = "bf16"

    def __init__(self, device: torch.device, kernel: str = "auto") -> None:
        super().__init__(device)
        self._gemm = Bf16Gemm(device, kernel)
        self.kernel = self._gemm.kernel
        self.activation_dtype = self._gemm.dtype

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        kernel = str(arm.axes["precision"].get("kernel", "auto"))
        reason = None if kernel == "auto" else why_not(kernel, torch.device(arm.device))
        return [reason] if reason else []

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        n, k = weight.shape
        bias = None if bias is None else bias.to(self.device, self.activation_dtype)
        return PackedLinear(k, n, {"weight": self._gemm.pack(weight)}, bias)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._gemm.matmul(x, packed)

    def dequantize(self, packed: PackedLinear) -> Tensor:
        return self._gemm.unpack(packed.tensors["weight"], packed)

    def rows(self, packed: PackedLinear, ids: Tensor) -> Tensor | None:
        return self._gemm.rows(packed, ids)
