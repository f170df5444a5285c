"""FP16 weights: three more bits of mantissa than BF16, and nothing above 65,504."""

from __future__ import annotations

import torch
from torch import Tensor

from impls.precision.gemm import Bf16Gemm
from impls.seams import LinearMethod, PackedLinear


class Fp16(LinearMethod):
    """Weights in FP16, accumulators in FP32; activations FP16 on CUDA and FP32 on a CPU.

    cublas_fp16          CUDA
    onednn_fp32_scratch  any CPU: widened a slice at a time and multiplied as FP32, which costs more than BF16's kernels
    """

    name = "fp16"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        on_cpu = device.type == "cpu"
        self.kernel = "onednn_fp32_scratch" if on_cpu else "cublas_fp16"
        self.activation_dtype = torch.float32 if on_cpu else torch.float16
        # Either of these kernels takes the type of the weights as it finds it.
        self._gemm = Bf16Gemm(device, "onednn_fp32_scratch" if on_cpu else "cublas_bf16")

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Numbers beyond FP16's range become infinite, as they do in any FP16 checkpoint."""
        n, k = weight.shape
        bias = None if bias is None else bias.to(self.device, self.activation_dtype)
        return PackedLinear(k, n, {"weight": weight.to(self.device, torch.float16).contiguous()}, bias)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._gemm.matmul(x, packed)

    def dequantize(self, packed: PackedLinear) -> Tensor:
        return packed.tensors["weight"].float()

    def rows(self, packed: PackedLinear, ids: Tensor) -> Tensor | None:
        return packed.tensors["weight"][ids].to(self.activation_dtype)
