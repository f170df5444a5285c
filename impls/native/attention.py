"""Paged causal attention on the C kernel: reads keys and values where they lie, through the block table."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from impls.native.build import load, num_threads
from impls.native.linear import describe

MAX_HEAD_DIM = 512
QUERY_DTYPES = (torch.float32, torch.bfloat16)
CACHE_DTYPES = (*QUERY_DTYPES, torch.int8, torch.float8_e4m3fn)  # in the order of `enum type` of paged_attention.c
SCALED_DTYPES = CACHE_DTYPES[2:]
_POINTERS = ("q", "k", "v", "out", "query_start", "seq_lens", "block_table", "k_scale", "v_scale")
_SIZES = ("num_seqs", "num_tokens", "num_blocks", "heads", "kv_heads", "dim", "block_size", "table_width")


class _Arguments(ctypes.Structure):
    """`struct attention` of paged_attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("q_stride", ctypes.c_int64 * 2),
        ("k_stride", ctypes.c_int64 * 3),
        ("v_stride", ctypes.c_int64 * 3),
        ("k_scale_stride", ctypes.c_int64 * 3),
        ("v_scale_stride", ctypes.c_int64 * 3),
        ("scale", ctypes.c_float),
        ("q_type", ctypes.c_int32),
        ("kv_type", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("derived", ctypes.c_int64 * 7),
    )


@cache
def _paged_attention() -> Callable[..., Any]:
    function = load().paged_attention
    function.argtypes = [ctypes.POINTER(_Arguments)]
    function.restype = ctypes.c_int
    return function


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    if q.dim() != 3 or q.dtype not in QUERY_DTYPES or q.stride(2) != 1 or q.device.type != "cpu":
        raise ValueError(f"q must be FP32 or BF16 [T, H, D] on the CPU, dense in D, not {describe(q)}")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4 or x.dtype not in CACHE_DTYPES or x.stride(3) != 1 or x.device.type != "cpu":
            raise ValueError(
                f"{name} must be FP32, BF16, INT8 or E4M3 [blocks, block_size, Hkv, D] on the CPU, dense in D, not"
                f" {describe(x)}"
            )
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(f"k_cache and v_cache must be alike: {describe(k_cache)}, {describe(v_cache)}")
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2] or q.shape[2] > MAX_HEAD_DIM:
        raise ValueError(
            f"q {list(q.shape)} does not fit a cache of {k_cache.shape[2]} heads of {k_cache.shape[3]} (at most"
            f" {MAX_HEAD_DIM})"
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != (k_cache.dtype in SCALED_DTYPES):
            raise ValueError(f"{name}: a cache of 8 bits, and no other, has scales; this one is {k_cache.dtype}")
        if scale is None:
            continue
        if scale.dtype != torch.bfloat16 or scale.shape != k_cache.shape[:3] or scale.device.type != "cpu":
            raise ValueError(f"{name} must be BF16 {list(k_cache.shape[:3])} on the CPU, not {describe(scale)}")


class PagedAttention:
    """Causal attention of one step's sequences, called once for every layer: the tables are checked only once.

    query_start: int32 [S + 1]; seq_lens: int32 [S], the last query's position + 1; block_table: int32 [S, blocks]; all
    contiguous, on the CPU. ValueError for others.
    """

    def __init__(self, query_start: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float) -> None:
        sequences = seq_lens.shape[0]
        shapes = ((sequences + 1,), (sequences,), (sequences, block_table.shape[-1]))
        self._tables = (query_start, seq_lens, block_table)
        for name, x, shape in zip(("query_start", "seq_lens", "block_table"), self._tables, shapes, strict=True):
            if x.dtype != torch.int32 or x.shape != shape or not x.is_contiguous() or x.device.type != "cpu":
                raise ValueError(f"{name} must be contiguous int32 {list(shape)} on the CPU, not {describe(x)}")
        self._kernel = _paged_attention()
        self._arguments = _Arguments(scale=scale, num_seqs=sequences, table_width=block_table.shape[-1])
        for name, x in zip(("query_start", "seq_lens", "block_table"), self._tables, strict=True):
            setattr(self._arguments, name, x.data_ptr())
        self._seen: tuple[object, ...] = ()

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """softmax(scale * Q K^T) V in FP32, in q's shape and dtype.

        q: FP32 or BF16 [T, H, D]; caches: FP32, BF16, or INT8 or E4M3 (no NaN) with BF16 scales [num_blocks,
        block_size, Hkv]: [num_blocks, block_size, Hkv, D]; any strides but D's. Rows of q past ``query_start[-1]`` come
        back as zeros. With few sequences their keys are cut into parts, so that the last bits may depend on the number
        of sequences. ValueError for other tensors, IndexError for a table that points outside its tensor.
        """
        arguments = self._arguments
        seen: tuple[object, ...] = (q.shape, q.stride(), q.dtype, k_cache.shape, k_cache.stride(), k_cache.dtype,
                                    v_cache.shape, v_cache.stride(), v_cache.dtype)  # fmt: skip
        for scale in (k_scale, v_scale):
            seen += (None,) if scale is None else (scale.shape, scale.stride(), scale.dtype)
        if seen != self._seen:
            _check(q, k_cache, v_cache, k_scale, v_scale)
            self._describe(q, k_cache, v_cache, k_scale, v_scale)
            self._seen = seen
        out = torch.empty(q.shape, dtype=q.dtype)
        arguments.q, arguments.k, arguments.v = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
        if k_scale is not None and v_scale is not None:
            arguments.k_scale, arguments.v_scale = k_scale.data_ptr(), v_scale.data_ptr()
        arguments.out, arguments.threads = out.data_ptr(), num_threads()
        status = self._kernel(arguments) if q.numel() else 0
        if status == 1:
            raise IndexError("query_start, seq_lens or block_table point outside their tensors")
        if status:
            raise MemoryError("paged_attention: out of memory")
        return out

    def _describe(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
    ) -> None:
        arguments = self._arguments
        arguments.num_tokens, arguments.heads, arguments.dim = q.shape
        arguments.num_blocks, arguments.block_size, arguments.kv_heads, _ = k_cache.shape
        arguments.q_stride[:], arguments.k_stride[:] = q.stride()[:2], k_cache.stride()[:3]
        arguments.v_stride[:] = v_cache.stride()[:3]
        arguments.q_type, arguments.kv_type = CACHE_DTYPES.index(q.dtype), CACHE_DTYPES.index(k_cache.dtype)
        if k_scale is not None and v_scale is not None:
            arguments.k_scale_stride[:], arguments.v_scale_stride[:] = k_scale.stride(), v_scale.stride()
