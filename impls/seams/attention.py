"""The step as tensors, and with which kernel it attends: `AttentionBackend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from impls.seams.arm import Arm, ModelShape


@dataclass
class StepBatch:
    """A prepared step. T rows (tokens), S sequences, R rows whose logits are wanted.

    input_ids, positions, slot_mapping: int64 [T] (slot = block * block_size + offset; -1 = do not store).
    query_start: int32 [S + 1]; seq_lens: int32 [S], K/V length after this step; block_table: int32 [S, max_blocks],
    rows padded with 0. logits_indices: int64 [R], rows of T. query_lens/kv_lens: the same lengths on the host.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    logits_indices: Tensor
    query_lens: list[int]
    kv_lens: list[int]
    block_size: int
    seq_ids: list[str] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Of all sequences together, static batching's padding and dead rows included."""
        return int(self.input_ids.shape[0])

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens, default=0)


class ScaledCache(NamedTuple):
    """One layer's keys, or values, in 8 bits: ``values * scales[..., None]``.

    values: int8 or float8_e4m3fn [num_blocks, block_size, num_kv_heads, head_dim]; scales: BF16, the same but head_dim.
    """

    values: Tensor
    scales: Tensor


LayerCache = Tensor | ScaledCache


def values_and_scales(cache: LayerCache) -> tuple[Tensor, Tensor | None]:
    """The numbers as they are kept, and what scales them, if anything does."""
    return (cache, None) if isinstance(cache, Tensor) else (cache.values, cache.scales)


class AttentionBackend(ABC):
    """Causal attention of a step's queries over a paged (or one-block) cache.

    q: [T, num_heads, head_dim]; k_cache, v_cache: one layer, [num_blocks, block_size, num_kv_heads, head_dim]; the
    step's own keys and values are already stored. Row i of a sequence attends to positions 0..its own position.
    Never reads a slot that was not written for that sequence. Returns [T, num_heads, head_dim] in q's dtype.

    ``reads_scaled``: what it does with a `ScaledCache`, for the record; None: it cannot read one.
    """

    reads_scaled: ClassVar[str | None] = None

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape, self.device = shape, device

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        """Reasons why the arm cannot run with this option; empty if it can."""
        return []

    @abstractmethod
    def prepare(self, batch: StepBatch) -> None:
        """Once a step, before the first layer: whatever does not depend on the layer."""

    @abstractmethod
    def forward(self, q: Tensor, k_cache: LayerCache, v_cache: LayerCache, layer: int) -> Tensor: ...

    def gathered_bytes(self, batch: StepBatch) -> int:
        """Bytes that this backend copies per step only to make the cache readable (all layers); counted in `bytes`."""
        return 0
