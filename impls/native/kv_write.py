"""A layer's new keys and values to their slots in 8 bits, each head's vector with its own scale, in one C call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from impls.native.build import load, num_threads
from impls.native.linear import describe

ALONE = 1 << 16  # numbers to write from which on a second thread pays for being woken


class _Arguments(ctypes.Structure):
    """`struct write` of kv_write.c."""

    _fields_ = (
        ("source", ctypes.c_void_p * 2),
        ("values", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("slots", ctypes.c_void_p),
        ("stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_slots", "heads", "dim")),
        *((name, ctypes.c_int32) for name in ("bf16", "fp8", "threads")),
    )


@cache
def _write_quantized() -> Callable[..., Any]:
    function = load().write_quantized
    function.argtypes = [ctypes.POINTER(_Arguments)]
    function.restype = ctypes.c_int
    return function


class QuantizedWrite:
    """Into one layer's rows, k and v alike: INT8 or E4M3 [num_slots, Hkv, D], BF16 scales [num_slots, Hkv]; contiguous,
    on the CPU. ValueError for others."""

    def __init__(self, k_rows: Tensor, v_rows: Tensor, k_scales: Tensor, v_scales: Tensor) -> None:
        self._kept = (k_rows, v_rows, k_scales, v_scales)
        for x in (k_rows, v_rows):
            known = x.dtype in (torch.int8, torch.float8_e4m3fn) and x.dtype == k_rows.dtype and x.shape == k_rows.shape
            if not known or x.dim() != 3 or not x.is_contiguous() or not x.is_cpu:
                raise ValueError(f"rows must be contiguous INT8 or E4M3 [slots, Hkv, D] on the CPU, not {describe(x)}")
        for x in (k_scales, v_scales):
            if x.dtype != torch.bfloat16 or x.shape != k_rows.shape[:2] or not x.is_contiguous() or not x.is_cpu:
                raise ValueError(f"scales must be contiguous BF16 {list(k_rows.shape[:2])}, not {describe(x)}")
        self._shape = k_rows.shape[1:]
        arguments = _Arguments(fp8=k_rows.dtype == torch.float8_e4m3fn)
        arguments.num_slots, arguments.heads, arguments.dim = k_rows.shape
        arguments.values[:] = k_rows.data_ptr(), v_rows.data_ptr()
        arguments.scales[:] = k_scales.data_ptr(), v_scales.data_ptr()
        self._arguments = arguments
        self._kernel = _write_quantized()

    def __call__(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """k, v: [T, Hkv, D] of any float type on the CPU, finite; slots: int64 [T], -1: stored nowhere.

        ValueError for other tensors, IndexError for a slot outside, and then nothing is stored.
        """
        for name, x in (("k", k), ("v", v)):
            if x.dim() != 3 or x.shape[1:] != self._shape or not x.is_cpu or not x.is_floating_point():
                raise ValueError(f"{name} must be floats [T, {self._shape[0]}, {self._shape[1]}], not {describe(x)}")
        if slots.dtype != torch.int64 or slots.shape != (len(k),) or len(v) != len(k) or not slots.is_cpu:
            raise ValueError(f"slots must be int64 [T] on the CPU, one a token, not {describe(slots)}")
        if k.dtype != v.dtype or k.dtype not in (torch.float32, torch.bfloat16):
            k, v = k.float(), v.float()
        k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
        slots = slots.contiguous()
        arguments = self._arguments
        arguments.source[:] = k.data_ptr(), v.data_ptr()
        arguments.stride[:] = *k.stride()[:2], *v.stride()[:2]
        arguments.slots, arguments.num_tokens = slots.data_ptr(), len(k)
        arguments.bf16 = k.dtype == torch.bfloat16
        arguments.threads = num_threads() if k.numel() >= ALONE else 1
        if self._kernel(arguments):
            raise IndexError(f"a slot is not within -1..{arguments.num_slots - 1}")
