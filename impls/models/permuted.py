"""The same model with its channels in another order, so that no quantiser finds the grid of an earlier one.

Weights that were once quantised lie on a grid by groups of neighbours; quantised again in the same groups they would
lose nothing. What is permuted changes no output: the residual stream's channels, each layer's FFN neurons, and the
channels of each value head together with the output projection that reads them. Queries and keys keep theirs, which
rotary embedding pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from impls.models.tensors import EMBEDDING, FINAL_NORM, HEAD
from impls.seams import ModelShape

_RESIDUAL, _NEURONS, _VALUES = range(3)  # purposes: each order has random numbers of its own
_NAME = re.compile(r"model\.layers\.(\d+)\.(?:\w+\.)?(\w+)\.(weight|bias)")


class PermutedWeights(Mapping[str, Tensor]):
    """``weights`` by Hugging Face name, permuted by ``seed`` when they are looked up.

    residual_order: int64 [hidden_size]; channel i of the new hidden states is channel residual_order[i] of the old.
    """

    def __init__(self, weights: Mapping[str, Tensor], shape: ModelShape, seed: int) -> None:
        self._weights, self._shape, self._seed = weights, shape, seed
        self.residual_order = self._order(_RESIDUAL, 0, shape.hidden_size)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name]
        for dim, order in enumerate(self._orders(name)):
            if order is not None and dim < tensor.dim():
                tensor = tensor.index_select(dim, order)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def _order(self, purpose: int, index: int, size: int) -> Tensor:
        draw = np.random.default_rng(np.random.SeedSequence((self._seed, purpose, index)))
        return torch.from_numpy(draw.permutation(size))

    def _orders(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Of a tensor's rows (or of a vector) and of its columns; None: as they are."""
        hidden = self.residual_order
        if name in (EMBEDDING, HEAD):
            return None, hidden
        if name == FINAL_NORM:
            return hidden, None
        match = _NAME.fullmatch(name)
        if match is None:
            return None, None
        layer, part = int(match[1]), match[2]
        if part in ("q_proj", "k_proj"):
            return None, hidden
        if part == "v_proj":
            return self._value_channels(layer, 1), hidden
        if part == "o_proj":
            return hidden, self._value_channels(layer, self._shape.num_heads // self._shape.num_kv_heads)
        if part in ("gate_proj", "up_proj", "down_proj"):
            neurons = self._order(_NEURONS, layer, self._shape.intermediate_size)
            return (hidden, neurons) if part == "down_proj" else (neurons, hidden)
        return (hidden, None) if part in ("input_layernorm", "post_attention_layernorm") else (None, None)

    def _value_channels(self, layer: int, heads_of_each: int) -> Tensor:
        """The order within every value head, for ``heads_of_each`` query heads that read it, head after head."""
        dim, kv_heads = self._shape.head_dim, self._shape.num_kv_heads
        heads = [head for head in range(kv_heads) for _ in range(heads_of_each)]
        orders = [self._order(_VALUES, layer * kv_heads + head, dim) for head in heads]
        return torch.cat([order + head * dim for head, order in enumerate(orders)])
