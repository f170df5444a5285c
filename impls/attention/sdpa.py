"""PyTorch's own fused kernel, `scaled_dot_product_attention`, brought to ragged sequences in a paged cache.

The kernel takes rectangles. A step is therefore cut into groups of sequences with the same number of queries and
similar lengths; each group is one call. The query heads of one KV head are packed as rows of that head, so its keys are
read once and never repeated. Keys lie in place where one view covers the group (one block per sequence, equal lengths);
elsewhere the live positions are gathered, layer by layer, into one buffer that all layers and steps share. The kernel
knows no 8-bit keys: those of a group are multiplied by their scales into a buffer of q's type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from impls.seams import KV_SCALE_BYTES, AttentionBackend, LayerCache, ModelShape, StepBatch, values_and_scales
from impls.upload import upload

MAX_PACKED_QUERIES = 16  # more queries than this fill a call on their own, and then a causal call beats a mask
MIN_GROUP = 8  # measured on 2 cores: below this a further call costs more than the padding that it saves
MAX_PADDING = 1.1  # from MIN_GROUP on, a longer sequence than this x the group's shortest starts a new group
MIN_VIEW = 2048  # one-block sequences of at least this length are read in place, each in its own call


@dataclass
class Group:
    """One kernel call: ``count`` sequences of ``query_len`` queries each, keys padded to ``kv_len``.

    rows: which rows of q. blocks: the slice of the cache that holds the keys in place, or None, and then ``slots``
    (int64 [count * kv_len]) says what to gather. mask: additive (bool until the first layer shows the dtype) or None.
    """

    rows: slice | Tensor
    count: int
    query_len: int
    kv_len: int
    blocks: slice | None = None
    slots: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False


class SDPAAttention(AttentionBackend):
    """Runs on every device; on a CPU it is the fastest that PyTorch alone offers."""

    reads_scaled = "8-bit K/V gathered and dequantised"

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self.query_heads_per_kv_head = shape.num_heads // shape.num_kv_heads
        self._groups: list[Group] = []
        self._covered = 0
        self._stored_bytes = self._widened_bytes = 0  # of a position's keys of one head, in the last step
        self._buffers: dict[str, Tensor] = {}

    # --- once a step --------------------------------------------------------------------------------------------------

    def prepare(self, batch: StepBatch) -> None:
        starts = [0]
        for query_len in batch.query_lens:
            starts.append(starts[-1] + query_len)
        # One block per sequence: its id decides whether a view will do (on CUDA this is one host sync a step).
        first_blocks = batch.block_table[:, 0].tolist() if batch.block_table.shape[1] == 1 else None
        self._groups = [
            self._plan(batch, members, starts, first_blocks)
            for members in partition(batch.query_lens, batch.kv_lens, one_block=first_blocks is not None)
        ]
        self._covered = sum(group.count * group.query_len for group in self._groups)

    def _plan(self, batch: StepBatch, members: list[int], starts: list[int], first_blocks: list[int] | None) -> Group:
        query_len = batch.query_lens[members[0]]
        kv_lens = [batch.kv_lens[i] for i in members]
        kv_len = max(kv_lens)
        equal = min(kv_lens) == kv_len
        rows = self._rows(members, starts, query_len)
        group = Group(rows, len(members), query_len, kv_len)
        group.causal = query_len > MAX_PACKED_QUERIES and query_len == kv_len
        if equal and first_blocks is not None:
            group.blocks = as_slice([first_blocks[i] for i in members])
        keys = torch.arange(kv_len, device=self.device)
        if group.blocks is None:
            # Padding repeats position 0, which is written: a masked key still meets 0 * NaN in the values.
            index = upload(members, self.device)
            keys_or_first = torch.where(keys < batch.seq_lens[index, None], keys, 0)
            blocks = batch.block_table[index].long().gather(1, keys_or_first // batch.block_size)
            group.slots = (blocks * batch.block_size + keys_or_first % batch.block_size).view(-1)
        if not group.causal and not (equal and query_len == 1):
            positions = batch.positions[rows].view(len(members), query_len, 1)
            group.mask = keys <= positions
        return group

    def _rows(self, members: list[int], starts: list[int], query_len: int) -> slice | Tensor:
        first = starts[members[0]]
        if [starts[i] for i in members] == list(range(first, first + len(members) * query_len, query_len)):
            return slice(first, first + len(members) * query_len)
        base = upload([starts[i] for i in members], self.device)
        return (base[:, None] + torch.arange(query_len, device=self.device)).view(-1)

    # --- once a layer -------------------------------------------------------------------------------------------------

    def forward(self, q: Tensor, k_cache: LayerCache, v_cache: LayerCache, layer: int) -> Tensor:
        values, scales = values_and_scales(k_cache)
        self._stored_bytes = q.shape[-1] * values.element_size() + (0 if scales is None else KV_SCALE_BYTES)
        self._widened_bytes = 0 if q.dtype == values.dtype else q.shape[-1] * q.element_size()
        if len(self._groups) == 1 and self._covered == len(q) and isinstance(self._groups[0].rows, slice):
            return self._attend(q, k_cache, v_cache, self._groups[0])
        out = torch.empty_like(q) if self._covered == len(q) else torch.zeros_like(q)
        for group in self._groups:
            out[group.rows] = self._attend(q[group.rows], k_cache, v_cache, group)
        return out

    def _attend(self, q: Tensor, k_cache: LayerCache, v_cache: LayerCache, group: Group) -> Tensor:
        """q [count * query_len, H, D] of one group, to the same shape."""
        count, query_len, packed = group.count, group.query_len, self.query_heads_per_kv_head
        num_kv_heads, head_dim = self.shape.num_kv_heads, q.shape[-1]
        keys = self._keys("k", k_cache, group, q.dtype)
        values = self._keys("v", v_cache, group, q.dtype)
        mask = self._mask(group, q.dtype)
        if query_len > MAX_PACKED_QUERIES:  # KV heads as the batch; one head's keys serve its queries
            rows = q.view(query_len, num_kv_heads, packed, head_dim).permute(1, 2, 0, 3)
            keys, values = (x[0, :, None].expand(-1, packed, -1, -1) for x in (keys, values))
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, is_causal=group.causal)
            return out.permute(2, 0, 1, 3).reshape(q.shape)
        rows = q.view(count, query_len, num_kv_heads, packed, head_dim).transpose(1, 2)
        rows = rows.reshape(count, num_kv_heads, query_len * packed, head_dim)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
        out = out.reshape(count, num_kv_heads, query_len, packed, head_dim).transpose(1, 2)
        return out.reshape(q.shape)

    def _keys(self, name: str, cache: LayerCache, group: Group, dtype: torch.dtype) -> Tensor:
        """[count, Hkv, kv_len, D] in ``dtype``: a view of the cache, or a copy of the group's live positions."""
        values, scales = values_and_scales(cache)
        keys = self._live(name, values, group)
        if keys.dtype != dtype:
            wide = self._buffer(f"{name} as {dtype}", dtype, group.count * group.kv_len, *keys.shape[2:])
            keys = wide.view(keys.shape).copy_(keys)
            if scales is not None:
                keys *= self._live(f"{name} scales", scales, group).unsqueeze(-1)
        return keys.transpose(1, 2)

    def _live(self, name: str, x: Tensor, group: Group) -> Tensor:
        """What lies at the group's positions, [count, kv_len, Hkv, ...] of x [num_blocks, block_size, Hkv, ...]."""
        if group.blocks is not None:
            return x[group.blocks, : group.kv_len]
        assert group.slots is not None
        block_size, bits = x.shape[1], x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
        if x.stride(0) == block_size * x.stride(1):
            gathered = self._buffer(name, bits.dtype, len(group.slots), *x.shape[2:])
            torch.index_select(bits.flatten(0, 1), 0, group.slots, out=gathered)
        else:  # interleaved storage: blocks cannot be flattened without copying the whole cache
            gathered = bits[group.slots // block_size, group.slots % block_size]
        return gathered.view(x.dtype).view(group.count, group.kv_len, *x.shape[2:])

    def _buffer(self, name: str, dtype: torch.dtype, length: int, *rest: int) -> Tensor:
        held = self._buffers.get(name)
        if held is None or len(held) < length:
            with torch.inference_mode(False):  # else it could not be written outside of inference mode
                held = torch.empty(2 * length, *rest, dtype=dtype, device=self.device)
            self._buffers[name] = held
        return held[:length]

    def _mask(self, group: Group, dtype: torch.dtype) -> Tensor | None:
        if group.mask is not None and group.mask.dtype == torch.bool:
            additive = torch.zeros(group.mask.shape, dtype=dtype, device=self.device)
            additive.masked_fill_(~group.mask, float("-inf"))
            if 1 < group.query_len <= MAX_PACKED_QUERIES:
                additive = additive.repeat_interleave(self.query_heads_per_kv_head, dim=1)
            group.mask = additive[:, None]
        return group.mask

    def gathered_bytes(self, batch: StepBatch) -> int:
        """Bytes written by the copies of the step just run: gathered as stored, then widened if q is wider."""
        per_position = 2 * self.shape.num_layers * self.shape.num_kv_heads
        gathered = sum(len(group.slots) for group in self._groups if group.slots is not None)
        keys = sum(group.count * group.kv_len for group in self._groups)
        return per_position * (gathered * self._stored_bytes + keys * self._widened_bytes)


def partition(query_lens: list[int], kv_lens: list[int], *, one_block: bool) -> list[list[int]]:
    """Which sequences share a call: long prompts alone; the rest by number of queries, then by similar length.

    Sequences without a query, or without a key, are in no group. Members are in ascending order.
    """
    alone: list[list[int]] = []
    by_queries: dict[int, list[int]] = {}
    for i, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        if query_len == 0 or kv_len == 0:
            continue
        if query_len > MAX_PACKED_QUERIES:
            alone.append([i])
        else:
            by_queries.setdefault(query_len, []).append(i)
    shared: list[list[int]] = []
    for members in by_queries.values():
        members.sort(key=lambda i: kv_lens[i])
        current: list[int] = []
        for i in members:
            longer = bool(current) and kv_lens[i] > kv_lens[current[0]]
            if longer and (
                (one_block and kv_lens[i] >= MIN_VIEW)
                or (len(current) >= MIN_GROUP and kv_lens[i] > MAX_PADDING * kv_lens[current[0]])
            ):
                shared.append(current)
                current = []
            current.append(i)
        shared.append(current)
    return alone + [sorted(members) for members in shared]


def as_slice(blocks: list[int]) -> slice | None:
    """The slice that lists exactly these blocks in this order, None if there is none."""
    step = blocks[1] - blocks[0] if len(blocks) > 1 else 1
    if step < 1 or blocks != list(range(blocks[0], blocks[0] + step * len(blocks), step)):
        return None
    return slice(blocks[0], blocks[-1] + 1, step)
