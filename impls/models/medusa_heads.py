"""Medusa's draft heads (Cai et al., ICML 2024, "Medusa-1"): each guesses another token ahead, knowing none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from impls.models.trained_head import TrainedHead
from impls.seams import LinearMethod, ModelShape


class MedusaHeads(TrainedHead):
    """From the final-normed hidden state h of a position head j makes h + silu(W_j h + b_j); the target's own head rows
    turn that into logits of the token j + 2 positions later (the next one is what h itself stands for).

    All heads are one matrix product, their logits another.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        target: ModelShape,
        method: LinearMethod,
        device: torch.device,
        num_heads: int,
    ) -> None:
        """tensors: ``weight`` [heads, hidden, hidden] and ``bias`` [heads, hidden] of at least ``num_heads`` heads, and
        what `TrainedHead` reads."""
        super().__init__(tensors, replace(target, num_kv_heads=0), method, device)  # it keeps no keys and values
        self.num_heads = num_heads
        weight, bias = tensors["weight"][:num_heads], tensors["bias"][:num_heads]
        self._blocks = method.pack(weight.flatten(0, 1), bias.flatten())
        self._bias_bytes = 0 if self._blocks.bias is None else self._blocks.bias.nbytes

    @property
    def weights_bytes(self) -> int:
        return self._blocks.num_bytes() + self._bias_bytes + self.head_bytes

    @property
    def row_parameters(self) -> int:
        return self.shape.hidden_size**2  # a row is one draft

    @property
    def observe_parameters(self) -> int:
        return 0

    def forward(self, hidden: Tensor) -> Tensor:
        """[S, hidden] to [S, num_heads, hidden]: what the heads put in place of the states that do not exist yet."""
        x = hidden.to(self.method.activation_dtype)
        blocks = F.silu(self.method.apply(x, self._blocks))
        return blocks.view(x.shape[0], self.num_heads, -1) + x.unsqueeze(1)
