"""The tensors behind the blocks: one pair for each layer, written by slot and read by block table."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor


class KVStorage:
    """Keys and values of every layer, [num_blocks, block_size, num_kv_heads, head_dim] each.

    A slot is ``block * block_size + offset``, int64: a block id times a stride passes 2**31 in a cache of common size.
    Memory is reserved, not touched: a slot holds garbage until it is written, and no reader may look at it before.

    Behind the last block lies one row that belongs to no block. Slot -1 (*do not store*) is the last row, hence that
    one: padding needs no test, no host sync and no branch, and cannot land in a block (vllm#43810).

    ``memory``: uint8 [bytes_needed] in which all of them lie, which another process may look at; None: their own.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: Tensor | None = None,
    ) -> None:
        self.num_layers, self.num_blocks, self.block_size, self.dtype = num_layers, num_blocks, block_size, dtype
        num_slots = num_blocks * block_size
        rows = (num_slots + 1, num_kv_heads, head_dim)
        blocks = (num_blocks, block_size, num_kv_heads, head_dim)
        if memory is None:
            all_rows = [torch.empty(rows, dtype=dtype, device=device) for _ in range(2 * num_layers)]
        else:
            all_rows = [part.view(dtype).view(rows) for part in memory.chunk(2 * num_layers)]
        self._k_rows, self._v_rows = all_rows[:num_layers], all_rows[num_layers:]
        self._k = [tensor[:num_slots].view(blocks) for tensor in self._k_rows]
        self._v = [tensor[:num_slots].view(blocks) for tensor in self._v_rows]

    @staticmethod
    def bytes_needed(
        num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """What `num_bytes` of such a storage will be."""
        return 2 * num_layers * (num_blocks * block_size + 1) * num_kv_heads * head_dim * dtype.itemsize

    def make_resident(self) -> None:
        """Touch every page. Memory that is only promised would flatter the arm that reserves most and writes least."""
        for tensor in (*self._k_rows, *self._v_rows):
            tensor.zero_()

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v [T, num_kv_heads, head_dim], any float type, at ``slot_mapping`` int64 [T]; -1 stores nothing."""
        if slot_mapping.dtype != torch.int64:
            raise TypeError(f"slot_mapping is {slot_mapping.dtype}, must be int64: smaller offsets overflow")
        self._k_rows[layer].index_put_((slot_mapping,), k.to(self.dtype))
        self._v_rows[layer].index_put_((slot_mapping,), v.to(self.dtype))

    def k(self, layer: int) -> Tensor:
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        return self._v[layer]

    def export(self, blocks: Seq[int]) -> Tensor:
        """A copy of whole blocks: [num_layers, 2 (k, v), len(blocks), block_size, num_kv_heads, head_dim]."""
        index = self._index(blocks)
        return torch.stack([torch.stack((k[index], v[index])) for k, v in zip(self._k, self._v, strict=True)])

    def import_(self, blocks: Seq[int], data: Tensor) -> None:
        """Write what `export` gave (of this or of another storage) to these blocks, in the order given."""
        if data.shape != (self.num_layers, 2, len(blocks), *self._k[0].shape[1:]) or data.dtype != self.dtype:
            raise ValueError(f"{data.dtype} {tuple(data.shape)} does not fit {len(blocks)} blocks of this storage")
        index = self._index(blocks)
        for layer, (k, v) in enumerate(zip(self._k, self._v, strict=True)):
            k[index], v[index] = data[layer].to(k.device)

    def num_bytes(self) -> int:
        """Bytes reserved for all layers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self._k_rows, *self._v_rows))

    def _index(self, blocks: Seq[int]) -> Tensor:
        if not all(0 <= block < self.num_blocks for block in blocks):
            raise IndexError(f"blocks {list(blocks)} are not all within 0..{self.num_blocks - 1}")
        return torch.tensor(list(blocks), dtype=torch.int64, device=self._k[0].device)
