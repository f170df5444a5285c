"""Paged attention by the project's own Triton kernel: blocks are read where they lie, nothing is gathered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from impls.gpu import why_no_triton
from impls.seams import Arm, AttentionBackend, LayerCache, ModelShape, StepBatch, values_and_scales

if TYPE_CHECKING:
    from types import ModuleType

# A step of fewer query blocks x KV heads leaves a large GPU idle: its keys are split. Not those of prompts: partial
# outputs of more queries a sequence cost more than they save.
SPLIT_PROGRAMS = 128
MAX_SPLIT_QUERIES = 16

Scratch = tuple[Tensor, Tensor, Tensor] | None  # partial outputs, maxima and sums of what is split


class TritonAttention(AttentionBackend):
    """One kernel for every step; one of few sequences that decode or verify drafts splits each sequence's keys.

    Launches depend on shapes and on what the host knows (``query_lens``, and which ``kv_lens`` are 0: padding), never
    on lengths that live on the device, so a CUDA graph captured for a decode batch replays for any lengths. Every
    stride is passed: caches may be views.
    """

    reads_scaled = "reads 8-bit K/V in place"

    def __init__(self, shape: ModelShape, device: torch.device, num_splits: int = 16) -> None:
        """num_splits: into how many parts a step of few sequences cuts its keys, a power of two; 1 never does, and then
        a sequence's output does not depend on how many others share the step."""
        super().__init__(shape, device)
        self.num_splits = num_splits
        self._kernels = _kernels()
        self.group = shape.num_heads // shape.num_kv_heads
        self._compiled = False
        self._splits = 0
        self._scratch: Scratch = None

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        reasons = []
        num_splits = arm.axes.get("attention", {}).get("num_splits", 1)
        if num_splits != next_power_of_2(num_splits):
            reasons.append(f"attention.num_splits={num_splits} must be a power of two")
        if arm.device != "cuda":
            reasons.append("needs CUDA (set TRITON_INTERPRET=1 only for tests)")
        elif why := why_no_triton(torch.device(arm.device)):
            reasons.append(why)
        return reasons

    def prepare(self, batch: StepBatch) -> None:
        self._batch, self._splits, self._scratch = batch, 0, None

    def forward(self, q: Tensor, k_cache: LayerCache, v_cache: LayerCache, layer: int) -> Tensor:
        if q.is_cuda and not self._compiled:
            self._compiled = True
            self.compile_variants(q, k_cache, v_cache)
        if not self._splits:  # the first layer of a step; in a captured graph the scratch is in the graph's own memory
            self._splits = self.splits_of(self._batch, q.element_size())
            self._scratch = self._new_scratch(len(q), self._splits)
        return self._launch(self._batch, self._splits, self._scratch, q, k_cache, v_cache)

    def splits_of(self, batch: StepBatch, element_bytes: int) -> int:
        """Into how many parts the keys of each of its sequences are cut; element_bytes: of q."""
        longest = batch.max_query_len
        if longest > MAX_SPLIT_QUERIES:
            return 1
        block_q = tile(longest, self.group, self.shape.head_dim, element_bytes)[0] // self.group
        real = (queries for queries, keys in zip(batch.query_lens, batch.kv_lens, strict=True) if keys)
        programs = self.shape.num_kv_heads * sum(-(-queries // block_q) for queries in real)
        return self.num_splits if programs <= SPLIT_PROGRAMS else 1

    def compile_variants(self, q: Tensor, k_cache: LayerCache, v_cache: LayerCache) -> None:
        """Of the kernels, all that a step with such tensors may need: a step of no keys each."""
        seen = set()
        for queries in range(1, MAX_SPLIT_QUERIES + 2):
            for splits in (1, self.num_splits if queries <= MAX_SPLIT_QUERIES else 1):
                variant = (tile(queries, self.group, self.shape.head_dim, q.element_size()), splits)
                if variant in seen:
                    continue
                seen.add(variant)
                rows = torch.empty_strided((queries, *q.shape[1:]), q.stride(), dtype=q.dtype, device=q.device)
                scratch = self._new_scratch(queries, splits)
                self._launch(_without_keys(queries, self._batch), splits, scratch, rows, k_cache, v_cache)

    def _new_scratch(self, num_tokens: int, splits: int) -> Scratch:
        if splits == 1:
            return None
        parts = (num_tokens, self.shape.num_heads, splits)
        return (
            torch.empty(*parts, self.shape.head_dim, device=self.device),
            torch.empty(parts, device=self.device),
            torch.empty(parts, device=self.device),
        )

    def _launch(
        self,
        batch: StepBatch,
        splits: int,
        scratch: Scratch,
        q: Tensor,
        k_cache: LayerCache,
        v_cache: LayerCache,
    ) -> Tensor:
        (k, k_scale), (v, v_scale) = values_and_scales(k_cache), values_and_scales(v_cache)
        if fp8 := k.dtype == torch.float8_e4m3fn:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        num_tokens, num_heads, head_dim = q.shape
        if q.stride(-1) != 1:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_seqs = len(batch.query_lens)
        if num_tokens == 0:
            return out
        block_m, block_n, warps = tile(batch.max_query_len, self.group, head_dim, q.element_size())
        block_q = block_m // self.group
        target, maxima, sums = scratch or (out, out, out)
        self._kernels.paged_attention_kernel[(num_tokens // block_q + num_seqs, self.shape.num_kv_heads, splits)](
            q,
            k,
            v,
            target,
            maxima,
            sums,
            q if k_scale is None else k_scale,  # some pointer: it is not read then
            q if v_scale is None else v_scale,
            batch.query_start,
            batch.seq_lens,
            batch.block_table,
            num_seqs,
            head_dim**-0.5 * math.log2(math.e),
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            *k.stride(),
            *v.stride(),
            *((0, 0, 0) if k_scale is None else k_scale.stride()),
            *((0, 0, 0) if v_scale is None else v_scale.stride()),
            batch.block_table.stride(0),
            BLOCK_SIZE=batch.block_size,
            GROUP=self.group,
            HEAD_DIM=head_dim,
            BLOCK_D=next_power_of_2(head_dim),
            BLOCK_Q=block_q,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            SPLITS=splits,
            SCALED=k_scale is not None,
            FP8=fp8,
            OPERAND=self._kernels.operand_type(q.dtype),
            num_warps=warps,
            num_stages=2,
        )
        if splits > 1:
            self._kernels.merge_splits_kernel[(num_tokens, num_heads)](
                target,
                maxima,
                sums,
                out,
                out.stride(0),
                out.stride(1),
                HEAD_DIM=head_dim,
                BLOCK_D=next_power_of_2(head_dim),
                SPLITS=splits,
                num_warps=4,
            )
        return out


def tile(max_query_len: int, group: int, head_dim: int, element_bytes: int) -> tuple[int, int, int]:
    """Rows (query tokens x heads of a KV head), keys and warps of one program.

    A tensor-core product needs 16 rows. Where these do not hold a sequence's queries there are more, so that a tile of
    keys serves more of them; wide or FP32 tiles are kept small enough for the 100 KB of shared memory that a block has
    on consumer devices.
    """
    wide = head_dim * element_bytes > 256
    rows = 16 if max_query_len == 1 or max_query_len * group <= 16 else 32 if wide else 64
    return max(rows, next_power_of_2(group)), 32 if wide else 64, 4


def _without_keys(queries: int, like: StepBatch) -> StepBatch:
    """A step of one sequence, with tensors as those of ``like``."""
    rows = torch.zeros(queries, dtype=torch.int64, device=like.query_start.device)
    none = rows[:1].to(torch.int32)
    return StepBatch(
        input_ids=rows,
        positions=rows,
        slot_mapping=rows - 1,
        query_start=torch.cat((none, none + queries)),
        seq_lens=none,
        block_table=none.view(1, 1),
        logits_indices=rows[:0],
        query_lens=[queries],
        kv_lens=[0],
        block_size=like.block_size,
    )


def next_power_of_2(n: int) -> int:
    """``n`` itself if it is one."""
    return 1 << (n - 1).bit_length()


def _kernels() -> ModuleType:
    """Imported when a backend is built: the package exists on few CPU-only machines, and reads its settings then."""
    from impls.attention import triton_kernels

    return triton_kernels
