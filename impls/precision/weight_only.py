"""Weight-only quantisation, rounded to nearest: floating-point activations, weights of 8, 4, 3 or 2 bits by group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from impls.native.grouped import GROUPS
from impls.precision.bf16 import Bf16
from impls.precision.grouped import GroupedWeight, round_symmetrically, round_to_nearest
from impls.precision.grouped_gemm import GroupedGemm, PackedGroups, why_not
from impls.seams import Arm, LinearMethod, ModelShape, PackedLinear


class WeightOnly(LinearMethod):
    """Weights of ``bits``; activations FP32 or BF16 as `GroupedGemm`'s kernel takes them; accumulators FP32.

    group_size  neighbouring inputs that share a scale (one of 32, 64, 128 that divides in_features); None: all inputs
                of an output channel
    head_bits   of the LM head, and of the embedding where they are tied: 16 is BF16, as most checkpoints leave it;
                8 has a scale for each token of the vocabulary, 4 groups like the layers'
    """

    packed_type = PackedGroups
    bits: int

    def __init__(
        self,
        device: torch.device,
        group_size: int | None = None,
        head_bits: Literal[4, 8, 16] = 16,
        kernel: str = "auto",
        permutation_seed: int | None = 0,
    ) -> None:
        super().__init__(device)
        self.group_size, self.permutation_seed = group_size, permutation_seed
        self._gemm = GroupedGemm(device, self.bits, by_row=group_size is None, kernel=kernel)
        self.kernel = self._gemm.kernel
        self.activation_dtype = self._gemm.dtype
        self._head = self._method_of_head(head_bits)

    def _method_of_head(self, bits: int) -> LinearMethod:
        if bits == 16:
            return Bf16(self.device)
        if bits == 8:
            return self if self.bits == 8 and self.group_size is None else Int8WeightOnly(self.device, head_bits=8)
        return self if self.bits == 4 else Int4(self.device, self.group_size, head_bits=4)

    @classmethod
    def weight_bits(cls, options: Mapping[str, Any]) -> float:
        """A group has a scale and an offset in 16 bits each."""
        size = options.get("group_size")
        return int(options.get("bits", cls.bits)) + (32 / size if isinstance(size, int) and size > 0 else 0.0)

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        options = arm.axes["precision"]
        size, kernel = options.get("group_size"), str(options.get("kernel", "auto"))
        bits, device = int(options.get("bits", cls.bits)), torch.device(arm.device)
        why = None if kernel == "auto" else why_not(kernel, device, bits, size is None)
        return why_no_groups(size, arm.model) + ([why] if why else [])

    def quantize(self, weight: Tensor) -> GroupedWeight:
        """FP32 [N, K] on the CPU to integers: what distinguishes one algorithm from another."""
        size = self.group_size or weight.shape[1]
        if self.bits == 8:
            return round_symmetrically(weight, size, self._gemm.scale_dtype)
        return round_to_nearest(weight, self.bits, size, self._gemm.scale_dtype)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return self._gemm.pack(self.quantize(weight.float()), bias)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._gemm.matmul(x, as_groups(packed))

    def dequantize(self, packed: PackedLinear) -> Tensor:
        return self._gemm.unpack(as_groups(packed))

    def rows(self, packed: PackedLinear, ids: Tensor) -> Tensor | None:
        return self._gemm.rows(as_groups(packed), ids)

    def head_method(self) -> LinearMethod:
        return self._head


class Int8WeightOnly(WeightOnly):
    """W8A16: symmetric."""

    name, bits = "int8_weight_only", 8


class Int4(WeightOnly):
    """W4A16, from a group's least to its greatest weight."""

    name, bits = "int4", 4


class Int3(WeightOnly):
    """As `Int4` with 8 levels; packed as two-bit and one-bit words."""

    name, bits = "int3", 3


class Int2(WeightOnly):
    """As `Int4` with 4 levels."""

    name, bits = "int2", 2


def as_groups(packed: PackedLinear) -> PackedGroups:
    """What `GroupedGemm.pack` gave."""
    assert isinstance(packed, PackedGroups)  # what `GroupedGemm.pack` gave
    return packed


def why_no_groups(group_size: int | None, shape: ModelShape) -> list[str]:
    """Why the inputs of this model's layers cannot be cut into groups of ``group_size``; [] if they can."""
    if group_size is None:
        return []
    inputs = {
        "hidden_size": shape.hidden_size,
        "num_heads * head_dim": shape.num_heads * shape.head_dim,
        "intermediate_size": shape.intermediate_size,
    }
    fitting = [str(size) for size in GROUPS if not any(n % size for n in inputs.values())]
    allowed = f"allowed: {', '.join([*fitting, 'null'])}"
    if group_size not in GROUPS:
        return [f"group_size={group_size} is not one of {', '.join(map(str, GROUPS))}; {allowed}"]
    return [
        f"group_size={group_size} does not divide {name}={n}; {allowed}" for name, n in inputs.items() if n % group_size
    ]
