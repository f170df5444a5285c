"""In what numbers linear layers are kept and computed: `LinearMethod`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

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
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class LinearMethod(ABC):
    """In what numbers a linear layer is kept and computed. The dequantised weights are the exact test reference."""

    name: str
    activation_dtype: torch.dtype  # of hidden states between layers, and of q, k, v
    emulated: str | None = None  # what is emulated on this device, None if nothing is
    kernel: str = ""  # the kernel that `apply` reaches on this device, for the record

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return []

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """From FP32 [out_features, in_features] on the CPU to what stays resident on the device."""

    @abstractmethod
    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """[rows, in_features] in ``activation_dtype`` to [rows, out_features] in ``activation_dtype``."""

    @abstractmethod
    def dequantize(self, packed: PackedLinear) -> Tensor:
        """FP32 [out_features, in_features]: exactly the weights that `apply` computes with."""

    def rows(self, packed: PackedLinear, ids: Tensor) -> Tensor | None:
        """A copy of the rows ``ids`` (int64 [T]) of the weights, [T, in_features] in ``activation_dtype``: a tied
        embedding. None if the layout cannot be read row by row; then, and only then, a second table is kept.
        """
        return None

    def head_method(self) -> LinearMethod:
        """The method for the LM head; the quantised methods leave it in BF16, as deployed checkpoints do."""
        return self
