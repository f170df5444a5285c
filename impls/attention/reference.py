"""The norm for every attention kernel: plain softmax attention in FP32, one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from impls.seams import AttentionBackend, LayerCache, StepBatch, values_and_scales


class ReferenceAttention(AttentionBackend):
    """softmax(Q K^T / sqrt(D)) V, written out. Slow on purpose: nothing here is worth doubting."""

    reads_scaled = "8-bit K/V dequantised to FP32"

    def prepare(self, batch: StepBatch) -> None:
        self._batch = batch
        self._tables = batch.block_table.tolist()

    def forward(self, q: Tensor, k_cache: LayerCache, v_cache: LayerCache, layer: int) -> Tensor:
        batch = self._batch
        out = torch.zeros_like(q)
        row = 0
        for table, query_len, kv_len in zip(self._tables, batch.query_lens, batch.kv_lens, strict=True):
            rows = slice(row, row + query_len)
            row += query_len
            if query_len and kv_len:
                keys = self._read(k_cache, table, kv_len)
                values = self._read(v_cache, table, kv_len)
                out[rows] = attend(q[rows].float(), keys, values, batch.positions[rows]).to(q.dtype)
        return out

    @staticmethod
    def _read(cache: LayerCache, table: list[int], kv_len: int) -> Tensor:
        """The first ``kv_len`` positions of a sequence, FP32 [kv_len, num_kv_heads, head_dim]."""
        values, scales = values_and_scales(cache)
        block_size = values.shape[1]

        def live(x: Tensor) -> Tensor:
            pieces = [x[block, : kv_len - i * block_size] for i, block in enumerate(table) if i * block_size < kv_len]
            return torch.cat([piece.float() for piece in pieces])

        return live(values) if scales is None else live(values) * live(scales)[..., None]

    def gathered_bytes(self, batch: StepBatch) -> int:
        """Every layer copies every live position, K and V, to FP32."""
        return 2 * 4 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim * sum(batch.kv_lens)


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """q [Q, H, D], keys and values [K, Hkv, D], positions int64 [Q]: row i sees keys 0..positions[i]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
    hidden = torch.arange(len(keys), device=q.device)[None, :] > positions[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
