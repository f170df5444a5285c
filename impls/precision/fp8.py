"""FP8 W8A8 in E4M3: torch._scaled_mm where the GPU multiplies FP8, the same rounding and a BF16 product elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from impls.precision.gemm import Bf16Gemm
from impls.precision.w8a8 import LARGEST, UNFUSED, W8A8, linear_sizes, round_to_e4m3, row_kernels, symmetric_scale
from impls.seams import Arm, PackedLinear

E4M3_MAX = LARGEST[torch.float8_e4m3fn]
GRANULARITIES = ("row", "tensor")


class Fp8(W8A8):
    """Weights and activations E4M3, accumulators FP32, scales FP32, outputs in ``activation_dtype``.

    granularity  row: one scale per output channel and one per token. tensor: one for the matrix and one for all rows
                 of a step, so that a token's rounding depends on who shares its batch
    scaled_mm    CUDA from compute capability 8.9 on (rows: 9.0); features must be multiples of 16; rows are quantised
                 by Triton, where it runs; else, and with one scale for all rows, the record says scaled_mm_unfused
    emulated     elsewhere: the same E4M3 numbers, which BF16 holds exactly, through `Bf16Gemm`; two bytes a weight
    """

    name = arithmetic = "fp8"

    def __init__(self, device: torch.device, granularity: str = "row", permutation_seed: int | None = 0) -> None:
        super().__init__(device, permutation_seed)
        if granularity not in GRANULARITIES:
            raise ValueError(f"granularity={granularity}: must be one of {', '.join(GRANULARITIES)}")
        self.granularity = granularity
        self._gemm: Bf16Gemm | None = None
        if multiplies_fp8(device):
            self.fused = row_kernels(device) if granularity == "row" else None
            self.kernel = "scaled_mm" + ("" if self.fused else UNFUSED)
        else:
            self._gemm = Bf16Gemm(device)
            self.kernel = f"emulated_{self._gemm.kernel}"
            self.emulated = "E4M3 values are multiplied as BF16: this device has no FP8 product"

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        granularity = str(arm.axes["precision"].get("granularity", "row"))
        if granularity not in GRANULARITIES:
            return [f"granularity={granularity}: must be one of {', '.join(GRANULARITIES)}"]
        device = torch.device(arm.device)
        if not multiplies_fp8(device):
            return []
        reasons = [f"{name}={n} must be a multiple of 16" for name, n in linear_sizes(arm).items() if n % 16]
        if granularity == "row" and torch.cuda.get_device_capability(device) < (9, 0):
            reasons.append("granularity=row needs compute capability 9.0; granularity=tensor runs here")
        return reasons

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        n, k = weight.shape
        weight = weight.float()
        scale = symmetric_scale(weight, E4M3_MAX, self._dim)
        values = round_to_e4m3(weight, scale)
        kept = self._gemm.pack(values) if self._gemm else values.to(self.device)
        tensors = {"weight": kept, "scale": scale.view(-1).to(self.device)}
        return PackedLinear(k, n, tensors, None if bias is None else bias.to(self.device, torch.float32))

    @property
    def _dim(self) -> int | None:
        return 1 if self.granularity == "row" else None

    def quantize_activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused is not None and not torch.compiler.is_compiling():
            quantized: tuple[Tensor, Tensor] = self.fused.quantize_rows(x, torch.float8_e4m3fn)
            return quantized
        scale = symmetric_scale(x, E4M3_MAX, self._dim)
        return round_to_e4m3(x, scale), scale

    def matmul(self, values: Tensor, packed: PackedLinear) -> Tensor:
        """E4M3 [rows, K] to the unscaled products [rows, N], BF16 or FP32 as the kernel gives them."""
        if self._gemm:
            return self._gemm.matmul(values.to(self._gemm.dtype), packed, with_bias=False)
        one = torch.ones((), device=self.device)
        return self._scaled_mm(values, one, packed.tensors["weight"], one)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if self._gemm or not x.shape[0]:
            return super().apply(x, packed)
        values, scale = self.quantize_activations(x)
        weight_scale = packed.tensors["scale"]
        weight_scale = weight_scale.view(1, -1) if self.granularity == "row" else weight_scale.view(())
        y = self._scaled_mm(values, scale, packed.tensors["weight"], weight_scale)
        return y if packed.bias is None else y + packed.bias.to(y.dtype)

    @staticmethod
    def _scaled_mm(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
        y: Tensor = torch._scaled_mm(
            values, weight.t(), scale_a=scale, scale_b=weight_scale, out_dtype=torch.bfloat16, use_fast_accum=False
        )
        return y

    def dequantize(self, packed: PackedLinear) -> Tensor:
        weight = packed.tensors["weight"]
        values = self._gemm.unpack(weight, packed) if self._gemm else weight.float()
        return values * packed.tensors["scale"].view(-1, 1)


def multiplies_fp8(device: torch.device) -> bool:
    """From compute capability 8.9 on (Ada, Hopper)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
