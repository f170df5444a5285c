"""In what numbers linear layers are kept and computed: `LinearMethod`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from impls.seams.arm import Arm


@dataclass
class PackedLinear:
    """One layer's weights as a `LinearMethod` keeps them. ``tensors`` are what is resident (scales included)."""

    in_features: int
    out_features: int
    tensors: dict[str, Tensor]
    bias: Tensor | None = None

    def num_bytes(self) -> int:
        """Of its tensors, scales included; a bias is not."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


# What the stage before it gave (the first: x), and the layer, to what the next one takes (the last: y).
Stage = Callable[[Any, PackedLinear], Any]


class LinearMethod(ABC):
    """In what numbers a linear layer is kept and computed. The dequantised weights are the exact test reference."""

    name: str
    packed_type: type[PackedLinear] = PackedLinear  # that `pack` gives; its fields are tensors, numbers and flags
    arithmetic: str = "bf16"  # fp32 | bf16 | fp8 | int8: which of a device's peaks its products are held against
    activation_dtype: torch.dtype  # of hidden states between layers, and of q, k, v
    emulated: str | None = None  # what is emulated on this device, None if nothing is
    kernel: str = ""  # the kernel that `apply` reaches on this device, for the record
    # Of the order in which a model's channels reach `pack` (`models.permuted`); None: as its file has them.
    permutation_seed: int | None = None
    calibration_tokens: int = 0  # of text that a model reads once through layers packed by `pack_calibrated`; 0: `pack`

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        """Reasons why the arm cannot run with this option; empty if it can."""
        return []

    @classmethod
    def weight_bits(cls, options: Mapping[str, Any]) -> float:
        """Of a layer that is packed with these options, scales included: what to expect before anything is built."""
        return 16.0

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """From FP32 [out_features, in_features] on the CPU to what stays resident on the device."""

    def pack_calibrated(self, weight: Tensor, inputs: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """`pack` for a layer that reads the likes of ``inputs``, [T, in_features] in ``activation_dtype``."""
        return self.pack(weight, bias)

    def example(self, weight: Tensor) -> Tensor:
        """The nearest FP32 weights that `pack` takes: for a probe of the method's speed, which has no model's layer."""
        return weight

    @abstractmethod
    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """[rows, in_features] in ``activation_dtype`` to [rows, out_features] in ``activation_dtype``."""

    @abstractmethod
    def dequantize(self, packed: PackedLinear) -> Tensor:
        """FP32 [out_features, in_features]: exactly the weights that `apply` computes with."""

    def stages(self) -> Mapping[str, Stage] | None:
        """`apply` as stages in turn, by name, for who times them apart; None where it has none."""
        return None

    def rows(self, packed: PackedLinear, ids: Tensor) -> Tensor | None:
        """A copy of the rows ``ids`` (int64 [T]) of the weights, [T, in_features] in ``activation_dtype``: a tied
        embedding. None if the layout cannot be read row by row; then, and only then, a second table is kept.
        """
        return None

    def head_method(self) -> LinearMethod:
        """The method for the LM head; the quantised methods leave it in BF16, as deployed checkpoints do."""
        return self

    def draft_head_method(self) -> LinearMethod:
        """The method for a draft head that was trained beside the model: as for the LM head, if `pack` takes any
        weights."""
        return self.head_method()
