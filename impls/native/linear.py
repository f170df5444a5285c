"""Linear layers on the C kernels: weights kept once, in BF16 or INT8, in the layout that the kernel streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from impls.native.build import load, num_threads

PANEL = 16  # output channels side by side in one panel of the packed layout


def pack_panels(weight: Tensor) -> Tensor:
    """[N, K] to [ceil(N/16), ceil(K/2), 16, 2], zero-padded: two neighbouring k of 16 channels lie together."""
    n, k = weight.shape
    padded = weight.new_zeros(-(-n // PANEL) * PANEL, k + k % 2)
    padded[:n, :k] = weight
    return padded.view(-1, PANEL, padded.shape[1] // 2, 2).permute(0, 2, 1, 3).contiguous()


def unpack_panels(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The inverse of `pack_panels`."""
    panels, pairs = packed.shape[:2]
    return packed.permute(0, 2, 1, 3).reshape(panels * PANEL, pairs * 2)[:out_features, :in_features]


def _check(x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, weight_dtype: torch.dtype) -> None:
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"x must be contiguous FP32 [rows, K] on the CPU, not {describe(x)}")
    _check_packed(packed, out_features, x.shape[1], weight_dtype)
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (out_features,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous FP32 [{out_features}], not {describe(bias)}")


def _check_packed(packed: Tensor, out_features: int, in_features: int, weight_dtype: torch.dtype) -> None:
    expected = (-(-out_features // PANEL), (in_features + 1) // 2, PANEL, 2)
    if packed.dtype != weight_dtype or packed.shape != expected or not packed.is_contiguous():
        raise ValueError(
            f"the weight must be {weight_dtype} from pack_panels, {list(expected)}, not {describe(packed)}"
        )


def describe(x: Tensor) -> str:
    """For the message that refuses it."""
    layout = "" if x.is_contiguous() else f" with strides {list(x.stride())}"
    return f"{x.dtype} {list(x.shape)} on {x.device.type}{layout}"


@cache
def _linear_bf16() -> Callable[..., Any]:
    function = load().linear_bf16
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    function.restype = None
    return function


def linear_bf16(x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    """x [rows, K] FP32 times BF16 weights from `pack_panels`, accumulated in FP32, to FP32 [rows, out_features].

    ValueError for any other dtype, shape or layout; `build.NativeUnavailable` without a compiler.
    """
    _check(x, packed, out_features, bias, torch.bfloat16)
    rows, k = x.shape
    out = torch.empty(rows, out_features)
    if not rows:
        return out
    pointer = None if bias is None else bias.data_ptr()
    _linear_bf16()(x.data_ptr(), packed.data_ptr(), pointer, out.data_ptr(), rows, out_features, k, num_threads())
    return out


@cache
def _rows_bf16() -> Callable[..., Any]:
    function = load().rows_bf16
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    function.restype = ctypes.c_int
    return function


def rows_bf16(packed: Tensor, ids: Tensor, out_features: int, in_features: int) -> Tensor:
    """Rows ``ids`` (int64 [T]) of BF16 weights from `pack_panels`, as FP32 [T, in_features].

    ValueError for any other dtype, shape or layout, IndexError for an id outside 0..out_features - 1.
    """
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.impls_native.rows_bf16(packed, ids, out_features, in_features)
        return result
    if ids.dtype != torch.int64 or not ids.is_cpu or ids.dim() != 1 or not ids.is_contiguous():
        raise ValueError(f"ids must be contiguous int64 [T] on the CPU, not {describe(ids)}")
    _check_packed(packed, out_features, in_features, torch.bfloat16)
    out = torch.empty(ids.shape[0], in_features)
    sizes = (ids.shape[0], out_features, in_features)
    if _rows_bf16()(packed.data_ptr(), ids.data_ptr(), out.data_ptr(), *sizes, num_threads()):
        raise IndexError(f"an id is outside 0..{out_features - 1}")
    return out


@cache
def _int8(name: str, pointers: int, sizes: int) -> Callable[..., Any]:
    function: ctypes._NamedFuncPointer = getattr(load(), name)
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes + [ctypes.c_int]
    function.restype = None if name == "quantize_int8" else ctypes.c_int
    return function


def linear_int8(x: Tensor, packed: Tensor, scale: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    """`quantize_int8`, `matmul_int8` and the scales in one call: FP32 [rows, K] to FP32 [rows, out_features].

    packed: INT8 from `pack_panels`; scale: FP32 [out_features]. ValueError for any other dtype, shape or layout.
    """
    _check(x, packed, out_features, bias, torch.int8)
    if scale.dtype != torch.float32 or scale.shape != (out_features,) or not scale.is_contiguous():
        raise ValueError(f"scale must be contiguous FP32 [{out_features}], not {describe(scale)}")
    rows, k = x.shape
    out = torch.empty(rows, out_features)
    if rows:
        pointers = (x.data_ptr(), packed.data_ptr(), scale.data_ptr(), None if bias is None else bias.data_ptr())
        if _int8("linear_int8", 5, 3)(*pointers, out.data_ptr(), rows, out_features, k, num_threads()):
            raise MemoryError("linear_int8: out of memory")
    return out


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 [rows, K] to INT8 in -127..127 and scales FP32 [rows, 1]: the largest magnitude of a row becomes 127."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"x must be contiguous FP32 [rows, K] on the CPU, not {describe(x)}")
    rows, k = x.shape
    values, scale = torch.empty(rows, k, dtype=torch.int8), torch.empty(rows, 1)
    _int8("quantize_int8", 3, 2)(x.data_ptr(), values.data_ptr(), scale.data_ptr(), rows, k, num_threads())
    return values, scale


def matmul_int8(values: Tensor, packed: Tensor, out_features: int) -> Tensor:
    """INT8 [rows, K] times INT8 weights from `pack_panels` to exact INT32 [rows, out_features] (K up to 133,000)."""
    if values.dtype != torch.int8 or values.device.type != "cpu" or values.dim() != 2 or not values.is_contiguous():
        raise ValueError(f"values must be contiguous INT8 [rows, K] on the CPU, not {describe(values)}")
    _check_packed(packed, out_features, values.shape[1], torch.int8)
    rows, k = values.shape
    out = torch.empty(rows, out_features, dtype=torch.int32)
    pointers = (values.data_ptr(), packed.data_ptr(), out.data_ptr())
    if rows and _int8("matmul_int8", 3, 3)(*pointers, rows, out_features, k, num_threads()):
        raise MemoryError("matmul_int8: out of memory")
    return out


def _rows_output_shape(packed: Tensor, ids: Tensor, out_features: int, in_features: int) -> Tensor:
    return packed.new_empty(ids.shape[0], in_features, dtype=torch.float32)


# What torch.compile traces in place of a call through ctypes, which it cannot see into: the embedding is looked up in a
# compiled model, while its linear layers are one operator each to it, whatever computes them.
torch.library.define(
    "impls_native::rows_bf16", "(Tensor packed, Tensor ids, int out_features, int in_features) -> Tensor"
)
torch.library.impl("impls_native::rows_bf16", "CPU", rows_bf16)
torch.library.register_fake("impls_native::rows_bf16", _rows_output_shape)
