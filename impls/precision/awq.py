"""AWQ: inputs that matter are made larger before rounding and smaller before multiplying (Lin et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from impls.precision.gptq import CALIBRATION_TOKENS
from impls.precision.grouped import round_to_nearest
from impls.precision.weight_only import WeightOnly, as_groups
from impls.seams import PackedLinear

STEPS = 10  # of the exponent between 0 (plain rounding) and 1
SAMPLES = 128  # tokens, spread over the text, whose outputs are compared at each step


class Awq(WeightOnly):
    """The format and kernels of `Int4`; each input is scaled by a power of its mean magnitude on natural text.

    The exponent of each layer is that of the least error of its outputs. What undoes the scale is kept with the layer
    and multiplies its activations; deployed checkpoints fold it into the operator before, which saves that pass.
    Weights are quantised at the first start, which ``startup_s`` shows, and kept (`packed_cache`).
    """

    name, bits = "awq", 4
    calibration_tokens = CALIBRATION_TOKENS

    def pack_calibrated(self, weight: Tensor, inputs: Tensor, bias: Tensor | None = None) -> PackedLinear:
        factors = input_factors(weight.float(), inputs, self.bits, self.group_size or weight.shape[1])
        packed = self._gemm.pack(self.quantize(weight.float() * factors), bias)
        packed.tensors["input_scale"] = (1 / factors).to(self.device, self.activation_dtype)
        return packed

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return super().apply(x * packed.tensors["input_scale"] if "input_scale" in packed.tensors else x, packed)

    def dequantize(self, packed: PackedLinear) -> Tensor:
        dense = self._gemm.unpack(as_groups(packed))
        return dense * packed.tensors["input_scale"].float() if "input_scale" in packed.tensors else dense


def input_factors(weight: Tensor, inputs: Tensor, bits: int, group_size: int) -> Tensor:
    """FP32 [K]: magnitude^e for the exponent e in 0, 1/`STEPS`, ... 1 at which the outputs for these inputs err least.

    weight: FP32 [N, K]; inputs [T, K]. Their scale is such that the largest and the least multiply to 1.
    """
    inputs = inputs.float().cpu()
    magnitude, sampled = inputs.abs().mean(0).clamp_min(1e-4), inputs[:: -(-len(inputs) // SAMPLES)]
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(STEPS + 1):
        factors = magnitude ** (step / STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = round_to_nearest(weight * factors, bits, group_size).dequantize() / factors - weight
        loss = float((sampled @ error.T).square().sum())
        if loss < least:
            best, least = factors, loss
    return best
