"""SmoothQuant: INT8 W8A8, large inputs made smaller and their weights larger beforehand (Xiao et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from impls.precision.gptq import CALIBRATION_TOKENS
from impls.precision.int8 import Int8
from impls.seams import Arm, PackedLinear
from impls.seams.precision import Stage

SMALLEST = 1e-5


class SmoothQuant(Int8):
    """The format and kernels of `Int8`; input j is divided by s_j, its weights multiplied by it.

    s_j = max|x_j|^alpha / max|w_j|^(1 - alpha). The maxima of x are natural text's. What divides is kept with the
    layer and meets the activations before they are quantised; deployed checkpoints fold it into the operator before,
    which saves that pass.
    """

    name = "smoothquant"
    calibration_tokens = CALIBRATION_TOKENS

    def __init__(
        self, device: torch.device, alpha: float = 0.5, kernel: str = "auto", permutation_seed: int | None = 0
    ) -> None:
        super().__init__(device, kernel, permutation_seed)
        self.alpha = alpha

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        alpha = arm.axes["precision"].get("alpha", 0.5)
        return super().validate(arm) + ([] if 0 <= alpha <= 1 else [f"alpha={alpha} must lie within 0 and 1"])

    def pack_calibrated(self, weight: Tensor, inputs: Tensor, bias: Tensor | None = None) -> PackedLinear:
        largest = inputs.float().cpu().abs().amax(0).clamp_min(SMALLEST)
        factors = largest**self.alpha / weight.float().abs().amax(0).clamp_min(SMALLEST) ** (1 - self.alpha)
        packed = self.pack(weight.float() * factors, bias)
        packed.tensors["input_scale"] = (1 / factors).to(self.device, self.activation_dtype)
        return packed

    def _smooth(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return x * packed.tensors["input_scale"] if "input_scale" in packed.tensors else x

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return super().apply(self._smooth(x, packed), packed)

    def stages(self) -> Mapping[str, Stage]:
        return {**super().stages(), "quantize": lambda x, packed: self.quantize_activations(self._smooth(x, packed))}

    def dequantize(self, packed: PackedLinear) -> Tensor:
        dense = super().dequantize(packed)
        return dense * packed.tensors["input_scale"].float() if "input_scale" in packed.tensors else dense
