"""The tensors behind the blocks: one pair for each layer, written by slot and read by block table."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls import native
from impls.kv_cache.quantized import LARGEST, SCALE_DTYPE, quantize
from impls.seams import KV_SCALE_BYTES, LayerCache, ScaledCache
from impls.upload import upload


class KVStorage:
    """Keys and values of every layer, [num_blocks, block_size, num_kv_heads, head_dim] each.

    A slot is ``block * block_size + offset``, int64: a block id times a stride passes 2**31 in a cache of common size.
    Memory is reserved, not touched: a slot holds garbage until it is written, and no reader may look at it before.

    Behind the last block lies one row that belongs to no block. Slot -1 (*do not store*) is the last row, hence that
    one: padding needs no test, no host sync and no branch, and cannot land in a block (vllm#43810).

    int8 and float8_e4m3fn are scaled (`quantized.quantize`), and a layer's keys or values are a `ScaledCache`.

    All lie in one piece of memory, so that blocks of all layers are gathered, or scattered, by one operator.

    ``memory``: uint8 [bytes_needed], that piece, which another process may look at; None: their own.
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
        self._scaled = dtype in LARGEST
        num_slots, count = num_blocks * block_size, 2 * num_layers
        rows = (num_slots + 1, num_kv_heads, head_dim)
        blocks = (num_blocks, block_size, num_kv_heads, head_dim)
        of_values, of_scales = _bytes_of_each(count, rows, dtype)
        if memory is None:
            memory = torch.empty(of_values + of_scales, dtype=torch.uint8, device=device)

        def in_blocks(x: Tensor) -> Tensor:
            """[2 * num_layers, num_slots + 1, ...] as [num_layers, 2, num_blocks, block_size, ...]."""
            shape = (2, num_layers, num_blocks, block_size, *x.shape[2:])
            return x[:, :num_slots].view(shape).transpose(0, 1)

        values = memory[:of_values].view(dtype).view(count, *rows)  # keys of all layers, then values
        scales = memory[of_values:].view(SCALE_DTYPE).view(count, *rows[:2]) if self._scaled else None
        self._rows = list(values)
        self._scales = [] if scales is None else list(scales)
        self._blocks = in_blocks(values)
        self._scale_blocks = None if scales is None else in_blocks(scales)
        layers: list[LayerCache] = [each[:num_slots].view(blocks) for each in self._rows]
        if self._scaled:
            paired = zip(self._rows, self._scales, strict=True)
            layers = [ScaledCache(x[:num_slots].view(blocks), s[:num_slots].view(blocks[:3])) for x, s in paired]
        self._k, self._v = layers[:num_layers], layers[num_layers:]
        self._writers: list[native.QuantizedWrite] = []
        if self._scaled and device.type == "cpu" and native.available():
            kinds = (slice(num_layers), slice(num_layers, None))  # k, v
            halves = (x[kind] for x in (self._rows, self._scales) for kind in kinds)
            self._writers = [native.QuantizedWrite(*layer) for layer in zip(*halves, strict=True)]

    @staticmethod
    def bytes_needed(
        num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """What `num_bytes` of such a storage will be."""
        return sum(_bytes_of_each(2 * num_layers, (num_blocks * block_size + 1, num_kv_heads, head_dim), dtype))

    def make_resident(self) -> None:
        """Touch every page. Memory that is only promised would flatter the arm that reserves most and writes least."""
        for tensor in (*self._rows, *self._scales):
            tensor.zero_()

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v [T, num_kv_heads, head_dim], any float type, at ``slot_mapping`` int64 [T]; -1 stores nothing."""
        if slot_mapping.dtype != torch.int64:
            raise TypeError(f"slot_mapping is {slot_mapping.dtype}, must be int64: smaller offsets overflow")
        if self._writers:
            self._writers[layer](k, v, slot_mapping)
            return
        for index, x in ((layer, k), (self.num_layers + layer, v)):
            if not self._scaled:
                self._rows[index].index_put_((slot_mapping,), x.to(self.dtype))
                continue
            values, scales = quantize(x, self.dtype)
            # As bytes: not every operator knows FP8.
            self._rows[index].view(torch.uint8).index_put_((slot_mapping,), values.view(torch.uint8))
            self._scales[index].index_put_((slot_mapping,), scales)

    def k(self, layer: int) -> LayerCache:
        return self._k[layer]

    def v(self, layer: int) -> LayerCache:
        return self._v[layer]

    def export(self, blocks: Seq[int]) -> Tensor:
        """A copy of whole blocks, [num_layers, 2 (k, v), len(blocks), block_size, num_kv_heads, head_dim] in `dtype`;
        8-bit vectors are longer by the bytes of their scale."""
        index = self._index(blocks)
        if self._scale_blocks is None:
            return self._blocks.index_select(2, index)
        # As bytes: not every operator knows FP8.
        values = self._blocks.view(torch.uint8).index_select(2, index)
        scales = self._scale_blocks.index_select(2, index).unsqueeze(-1).view(torch.uint8)
        return torch.cat((values, scales), -1).view(self.dtype)

    def import_(self, blocks: Seq[int], data: Tensor) -> None:
        """Write what `export` gave (of this or of another storage) to these blocks, in the order given."""
        head_dim = self._rows[0].shape[-1]
        if data.shape != self._shape(len(blocks)) or data.dtype != self.dtype:
            raise ValueError(f"{data.dtype} {tuple(data.shape)} does not fit {len(blocks)} blocks of this storage")
        index = self._index(blocks)
        data = data.to(index.device, non_blocking=True)
        if self._scale_blocks is None:
            self._blocks[:, :, index] = data
            return
        data = data.view(torch.uint8)
        self._blocks.view(torch.uint8)[:, :, index] = data[..., :head_dim]
        self._scale_blocks[:, :, index] = data[..., head_dim:].contiguous().view(SCALE_DTYPE).squeeze(-1)

    def empty(self, num_blocks: int) -> Tensor:
        """Unfilled memory for what `export` gives of so many blocks."""
        return torch.empty(self._shape(num_blocks), dtype=self.dtype, device=self._rows[0].device)

    def num_bytes(self) -> int:
        """Bytes reserved for all layers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self._rows, *self._scales))

    def _shape(self, num_blocks: int) -> tuple[int, ...]:
        num_kv_heads, head_dim = self._rows[0].shape[1:]
        width = head_dim + (KV_SCALE_BYTES if self._scaled else 0)
        return (self.num_layers, 2, num_blocks, self.block_size, num_kv_heads, width)

    def _index(self, blocks: Seq[int]) -> Tensor:
        if not all(0 <= block < self.num_blocks for block in blocks):
            raise IndexError(f"blocks {list(blocks)} are not all within 0..{self.num_blocks - 1}")
        return upload(list(blocks), self._rows[0].device)


def _bytes_of_each(count: int, rows: tuple[int, int, int], dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the values and of the scales in ``count`` tensors of these rows."""
    scale_bytes = KV_SCALE_BYTES if dtype in LARGEST else 0
    return count * math.prod(rows) * dtype.itemsize, count * rows[0] * rows[1] * scale_bytes
