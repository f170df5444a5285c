"""Random steps and caches on which a backend is compared with the reference. Not a test module."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from impls.attention.reference import ReferenceAttention
from impls.kv_cache.quantized import quantize
from impls.seams import AttentionBackend, LayerCache, ModelShape, ScaledCache, StepBatch


def model_shape(num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 64, num_layers: int = 1) -> ModelShape:
    return ModelShape(
        vocab_size=64,
        hidden_size=num_heads * head_dim,
        intermediate_size=64,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=4096,
    )


class Step:
    """One step over a cache in which only what belongs to a sequence is written; the rest holds ``poison``."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        block_size: int,
        shape: ModelShape | None = None,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        layout: str = "plain",
        shuffle: bool = True,
        poison: float = math.nan,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        """lens: (query_len, kv_len) of each sequence. layout: as in `empty_caches`."""
        self.shape = shape or model_shape()
        self.device = torch.device(device)
        rng = np.random.default_rng(seed)
        needed = [max(1, math.ceil(kv_len / block_size)) for _, kv_len in lens]
        blocks = rng.permutation(sum(needed) + 3) if shuffle else np.arange(sum(needed) + 3)
        table = torch.zeros(len(lens), max(needed), dtype=torch.int32)
        query_start, slots, positions = [0], [], []
        taken = 0
        for i, (query_len, kv_len) in enumerate(lens):
            table[i, : needed[i]] = torch.from_numpy(blocks[taken : taken + needed[i]])
            taken += needed[i]
            query_start.append(query_start[-1] + query_len)
            own = torch.arange(kv_len)
            slots.append(table[i, own // block_size].long() * block_size + own % block_size)
            positions += range(kv_len - query_len, kv_len)
        tokens = query_start[-1]
        self.batch = StepBatch(
            input_ids=torch.zeros(tokens, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            slot_mapping=torch.cat([s[len(s) - q :] for s, (q, _) in zip(slots, lens, strict=True)]),
            query_start=torch.tensor(query_start, dtype=torch.int32),
            seq_lens=torch.tensor([kv_len for _, kv_len in lens], dtype=torch.int32),
            block_table=table,
            logits_indices=torch.tensor(query_start[1:], dtype=torch.int64) - 1,
            query_lens=[query_len for query_len, _ in lens],
            kv_lens=[kv_len for _, kv_len in lens],
            block_size=block_size,
        )
        written = torch.cat(slots)
        self.written = (written // block_size, written % block_size)
        draw = torch.Generator().manual_seed(seed)
        size = (len(blocks), block_size, self.shape.num_kv_heads, self.shape.head_dim)
        empty = [x.to(self.device) for x in empty_caches(size, cache_dtype or dtype, layout, poison)]
        for cache in empty:
            cache[self.written] = torch.randn(len(written), *size[2:], generator=draw).to(cache)
        self.k: LayerCache
        self.v: LayerCache
        self.k, self.v = empty
        self.q = torch.randn(tokens, self.shape.num_heads, self.shape.head_dim, generator=draw).to(self.device, dtype)
        moved = {
            name: value.to(self.device) for name, value in vars(self.batch).items() if isinstance(value, torch.Tensor)
        }
        self.batch = replace(self.batch, **moved)

    def run(self, backend: AttentionBackend) -> Tensor:
        backend.prepare(self.batch)
        return backend.forward(self.q, self.k, self.v, 0)

    def reference(self) -> Tensor:
        return self.run(ReferenceAttention(self.shape, self.device))

    def backend(self, kind: type[AttentionBackend]) -> AttentionBackend:
        return kind(self.shape, self.device)


def in_8_bits(step: Step, dtype: torch.dtype, layout: str = "plain", poison: float = math.nan) -> tuple[Step, Step]:
    """The same step over a cache of 8 bits, and over the FP32 numbers that this cache stands for."""
    scaled, wide = copy.copy(step), copy.copy(step)
    pairs = [x.to(step.device) for x in empty_caches(tuple(step.k.shape), torch.uint8, layout, 0x7F)]  # E4M3: NaN
    for name, kept in zip(("k", "v"), pairs, strict=True):
        values, scales = quantize(getattr(step, name)[step.written], dtype)
        kept[step.written] = values.view(torch.uint8)
        of_scales = torch.full(tuple(kept.shape[:3]), poison, dtype=scales.dtype, device=step.device)
        if layout == "heads_first":
            of_scales = of_scales.transpose(1, 2).contiguous().transpose(1, 2)
        of_scales[step.written] = scales
        setattr(scaled, name, ScaledCache(kept.view(dtype), of_scales))
        dequantised = torch.full(tuple(kept.shape), poison, device=step.device)
        dequantised[step.written] = values.float() * scales.float()[..., None]
        setattr(wide, name, dequantised)
    return scaled, wide


def empty_caches(
    size: tuple[int, int, int, int], dtype: torch.dtype, layout: str, fill: float
) -> tuple[Tensor, Tensor]:
    blocks, block_size, heads, dim = size
    if layout == "plain":
        return torch.full(size, fill, dtype=dtype), torch.full(size, fill, dtype=dtype)
    if layout == "interleaved":  # one tensor holds K and V of a block side by side: block stride is not block_size rows
        both = torch.full((blocks, 2, block_size, heads, dim), fill, dtype=dtype)
        return both[:, 0], both[:, 1]
    if layout == "heads_first":
        k, v = (torch.full((blocks, heads, block_size, dim), fill, dtype=dtype).transpose(1, 2) for _ in range(2))
        return k, v
    raise ValueError(layout)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-6, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


MIXED = [(1, 1), (7, 7), (1, 33), (5, 40), (0, 12), (23, 23), (17, 60), (1, 64), (2, 16)]
DECODE = [(1, 1), (1, 16), (1, 17), (1, 100), (1, 31)]
