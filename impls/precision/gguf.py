"""A GGUF file's own Q4_1 and Q8_0 blocks, multiplied as they are stored: nothing is quantised a second time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from impls.precision.bf16 import Bf16
from impls.precision.grouped import GroupedWeight, round_symmetrically, round_to_nearest
from impls.precision.grouped_gemm import GroupedGemm, PackedGroups, own_kernel
from impls.precision.weight_only import as_groups, why_no_groups
from impls.seams import Arm, LinearMethod, PackedLinear

BLOCK = 32
TYPES = ("Q4_1", "Q8_0")
FUSED = (re.compile(r"\b[qkv]_proj"), re.compile(r"\b(gate|up)_proj"))  # weights that are one layer here


class Gguf(LinearMethod):
    """Blocks of 32 weights with an FP16 scale: Q4_1 (4 bits and an FP16 minimum) and Q8_0 (8 bits, symmetric).

    The file's numbers reach `pack` as FP32. A block's least and greatest are its lowest and highest level, as llama.cpp
    quantises, so the grid can be read off them; that it was read rightly is checked: `dequantize` gives the same FP32
    numbers back, bit for bit, or `pack` refuses. FP32 accumulators; activations FP32 in the native kernel, BF16 in
    Triton's (llama.cpp rounds them to 8 bits). Channels are never permuted: the blocks are the point.
    """

    name = "gguf"
    packed_type = PackedGroups

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.kernel = own_kernel(device)  # torch's operators would round the FP16 scales to the activations' type
        self._gemms = {bits: GroupedGemm(device, bits, kernel=self.kernel) for bits in (4, 8)}
        self.activation_dtype = self._gemms[4].dtype

    @classmethod
    def weight_bits(cls, options: Mapping[str, Any]) -> float:
        """Of Q4_1, as most projections are."""
        return 4 + 32 / BLOCK

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        if not arm.stored_types:
            return [f"model={arm.axes.get('model', {}).get('name')} is no GGUF file, whose blocks this would use"]
        return why_no_groups(BLOCK, arm.model) + _why_not_stored(arm.stored_types)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """ValueError if the weights are neither Q4_1 nor Q8_0 blocks."""
        found = stored_blocks(weight.float())
        return self._gemms[found.bits].pack(found, bias)

    def example(self, weight: Tensor) -> Tensor:
        return round_to_nearest(weight, 4, BLOCK).dequantize()

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._gemm_of(packed).matmul(x, as_groups(packed))

    def dequantize(self, packed: PackedLinear) -> Tensor:
        return self._gemm_of(packed).unpack(as_groups(packed))

    def rows(self, packed: PackedLinear, ids: Tensor) -> Tensor | None:
        return self._gemm_of(packed).rows(as_groups(packed), ids)

    def draft_head_method(self) -> LinearMethod:
        """The file has no blocks of a draft head, which was trained after it."""
        return Bf16(self.device)

    def _gemm_of(self, packed: PackedLinear) -> GroupedGemm:
        return self._gemms[as_groups(packed).bits]


def _why_not_stored(types: Mapping[str, str]) -> list[str]:
    """A reason for each other type of blocks among the weights that are multiplied, and for layers of two types."""
    head = "lm_head.weight" if "lm_head.weight" in types else "model.embed_tokens.weight"
    multiplied = {name: kind for name, kind in types.items() if name == head or name.endswith("_proj.weight")}
    others: dict[str, str] = {}
    for name, kind in multiplied.items():
        if kind not in TYPES:
            others.setdefault(kind, name)
    if others:
        return [f"{name} is stored as {kind}, not as {' or '.join(TYPES)} blocks" for kind, name in others.items()]
    layers: dict[str, tuple[str, str]] = {}
    for name, kind in multiplied.items():
        layer = FUSED[1].sub("gate_up_proj", FUSED[0].sub("qkv_proj", name))
        first, its_kind = layers.setdefault(layer, (name, kind))
        if kind != its_kind:
            return [f"{name} is stored as {kind}, but {first} as {its_kind}: they are one layer, of one type"]
    return []


def stored_blocks(weight: Tensor) -> GroupedWeight:
    """The Q4_1 or Q8_0 blocks that FP32 weights [N, K] were dequantised from. ValueError if from neither."""
    if weight.shape[1] % BLOCK == 0:
        for found in (round_to_nearest(weight, 4, BLOCK), round_symmetrically(weight, BLOCK)):
            if torch.equal(found.dequantize(), weight):
                return found
    n, k = weight.shape
    raise ValueError(f"precision=gguf: a layer of {n} x {k} weights is not stored as Q4_1 or Q8_0 blocks")
