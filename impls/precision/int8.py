"""INT8 W8A8: symmetric, one scale per output channel and one per token, computed from that token alone."""

from __future__ import annotations

import torch
from torch import Tensor

from impls import native
from impls.precision.cpu_features import has_int8_instructions
from impls.precision.gemm import Bf16Gemm
from impls.precision.int_mm import CUDA_MIN_ROWS, padded_int_mm
from impls.precision.w8a8 import UNFUSED, W8A8, linear_sizes, quantize_int8, row_kernels
from impls.seams import Arm, PackedLinear

KERNELS = ("cublas_int8", "onednn_int8", "native_int8", "onednn_fp32_scratch")


class Int8(W8A8):
    """Weights and activations INT8, accumulators INT32, scales FP32, outputs in ``activation_dtype``.

    cublas_int8          CUDA, torch._int_mm; in_features and out_features must be multiples of 8; Triton quantises
                         before it and rescales after it, where it runs (else the record says cublas_int8_unfused)
    onednn_int8          CPU, torch._int_mm: the choice where the CPU has VNNI or AMX, a scalar loop where not
    native_int8          any CPU with a C compiler: `impls.native`; `apply` quantises and rescales in the same call
    onednn_fp32_scratch  any CPU: the same integers as floating-point numbers, held in BF16 (exact) and accumulated
                         in FP32, which is exact while a sum stays under 2^24 (in_features <= 1040 guarantees it)
    """

    name = arithmetic = "int8"

    def __init__(self, device: torch.device, kernel: str = "auto", permutation_seed: int | None = 0) -> None:
        super().__init__(device, permutation_seed)
        self.kernel = best_kernel(device) if kernel == "auto" else kernel
        if why := why_not(self.kernel, device):
            raise ValueError(why)
        self._gemm: Bf16Gemm | None = None
        self._cublas = self.kernel == "cublas_int8"
        if self._cublas:
            self.fused = row_kernels(device)
            self.kernel += "" if self.fused else UNFUSED
        if self.kernel == "onednn_fp32_scratch":
            self._gemm = Bf16Gemm(device, self.kernel)
            self.emulated = "INT8 values are multiplied as FP32: this CPU has no 8-bit dot product (VNNI, AMX)"

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        device = torch.device(arm.device)
        kernel = str(arm.axes["precision"].get("kernel", "auto"))
        reason = None if kernel == "auto" else why_not(kernel, device)
        reasons = [reason] if reason else []
        if device.type == "cuda":
            sizes = linear_sizes(arm)
            reasons += [f"{name}={size} must be a multiple of 8" for name, size in sizes.items() if size % 8]
        return reasons

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        n, k = weight.shape
        values, scale = quantize_int8(weight.float())
        if self.kernel == "native_int8":
            kept = native.pack_panels(values)
        else:
            kept = self._gemm.pack(values) if self._gemm else values.to(self.device)
        tensors = {"weight": kept, "scale": scale.view(n).to(self.device)}
        return PackedLinear(k, n, tensors, None if bias is None else bias.to(self.device, torch.float32))

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        weight, scale = packed.tensors["weight"], packed.tensors["scale"]
        if self.fused is not None and x.shape[0] and not torch.compiler.is_compiling():
            values, x_scale = self.fused.quantize_rows(x, torch.int8, CUDA_MIN_ROWS)
            return self.rescale(padded_int_mm(values, weight), x_scale, packed)
        if self.kernel != "native_int8":
            return super().apply(x, packed)
        y = native.linear_int8(x.float().contiguous(), weight, scale, packed.out_features, packed.bias)
        return y.to(self.activation_dtype)

    def quantize_activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.kernel == "native_int8":
            return native.quantize_int8(x.float().contiguous())
        if self.fused is not None and not torch.compiler.is_compiling():
            quantized: tuple[Tensor, Tensor] = self.fused.quantize_rows(x, torch.int8)
            return quantized
        return quantize_int8(x)

    def matmul(self, values: Tensor, packed: PackedLinear) -> Tensor:
        """INT8 [rows, K] to INT32 [rows, N]; the same integers in FP32 under ``onednn_fp32_scratch``."""
        if self._gemm:
            return self._gemm.matmul(values.float(), packed, with_bias=False)
        if self.kernel == "native_int8":
            return native.matmul_int8(values, packed.tensors["weight"], packed.out_features)
        if self._cublas:
            return padded_int_mm(values, packed.tensors["weight"])
        return torch._int_mm(values, packed.tensors["weight"].t())

    def dequantize(self, packed: PackedLinear) -> Tensor:
        weight = packed.tensors["weight"]
        if self.kernel == "native_int8":
            weight = native.unpack_panels(weight, packed.out_features, packed.in_features)
        values = self._gemm.unpack(weight, packed) if self._gemm else weight.float()
        return values * packed.tensors["scale"].view(-1, 1)


def best_kernel(device: torch.device) -> str:
    """The fastest that this device has."""
    if device.type != "cpu":
        return "cublas_int8"
    if has_int8_instructions():
        return "onednn_int8"
    return "native_int8" if native.available() else "onednn_fp32_scratch"


def why_not(kernel: str, device: torch.device) -> str | None:
    """Why ``kernel`` cannot run on ``device``; None if it can."""
    if kernel not in KERNELS:
        return f"kernel={kernel}: must be auto or one of {', '.join(KERNELS)}"
    if (kernel == "cublas_int8") != (device.type != "cpu"):
        return f"kernel={kernel}: not a kernel for device {device.type}"
    if kernel == "native_int8" and (why := native.why_unavailable()):
        return f"kernel={kernel}: {why}"
    return None
