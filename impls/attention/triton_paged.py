"""Paged attention by the project's own Triton kernel: blocks are read where they lie, nothing is gathered."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from impls.seams import Arm, AttentionBackend, LayerCache, ModelShape, StepBatch, values_and_scales

if TYPE_CHECKING:
    from types import ModuleType

SPLIT_PROGRAMS = 128  # a decode step of fewer sequences x KV heads than this leaves a large GPU idle: split its keys


class TritonAttention(AttentionBackend):
    """One kernel for every step; a step of single-token queries of few sequences splits each sequence's keys.

    Launches depend on shapes and on the host's ``query_lens`` only, never on lengths that live on the device, so a CUDA
    graph captured for a decode batch replays for any lengths. Every stride is passed: caches may be views.
    """

    reads_scaled = "reads 8-bit K/V in place"

    def __init__(self, shape: ModelShape, device: torch.device, num_splits: int = 16) -> None:
        """num_splits: into how many parts a decode step of few sequences cuts its keys, a power of two; 1 never does,
        and then a sequence's output does not depend on how many others share the step."""
        super().__init__(shape, device)
        self.num_splits = num_splits
        self._kernels = _kernels()
        self.group = shape.num_heads // shape.num_kv_heads
        self.max_split_seqs = max(1, SPLIT_PROGRAMS // shape.num_kv_heads)
        self._scratch: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        reasons = []
        num_splits = arm.axes.get("attention", {}).get("num_splits", 1)
        if num_splits != next_power_of_2(num_splits):
            reasons.append(f"attention.num_splits={num_splits} must be a power of two")
        if arm.device != "cuda":
            reasons.append("needs CUDA (set TRITON_INTERPRET=1 only for tests)")
        elif importlib.util.find_spec("triton") is None:
            reasons.append("needs the package triton, which is not installed")
        return reasons

    def prepare(self, batch: StepBatch) -> None:
        self._batch = batch
        few = batch.max_query_len == 1 and len(batch.query_lens) <= self.max_split_seqs
        self._splits = self.num_splits if few else 1
        if self._splits > 1 and self._scratch is None:
            self._scratch = self._new_scratch()

    def _new_scratch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Partial outputs, maxima and sums at their largest, once: a captured graph keeps their addresses."""
        parts = (self.max_split_seqs, self.shape.num_heads, self.num_splits)
        with torch.inference_mode(False):
            return (
                torch.empty(*parts, self.shape.head_dim, device=self.device),
                torch.empty(parts, device=self.device),
                torch.empty(parts, device=self.device),
            )

    def forward(self, q: Tensor, k_cache: LayerCache, v_cache: LayerCache, layer: int) -> Tensor:
        batch, splits = self._batch, self._splits
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
        target, maxima, sums = (out, out, out) if splits == 1 else self._scratch or self._new_scratch()
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

    A tensor-core product needs 16 rows. Prefill takes more, so that a tile of keys serves more queries; wide or FP32
    tiles are kept small enough for the 100 KB of shared memory that a block has on consumer devices.
    """
    wide = head_dim * element_bytes > 256
    rows = 16 if max_query_len == 1 else 32 if wide else 64
    return max(rows, next_power_of_2(group)), 32 if wide else 64, 4


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _kernels() -> ModuleType:
    """Imported when a backend is built: the package exists on few CPU-only machines, and reads its settings then."""
    from impls.attention import triton_kernels

    return triton_kernels
