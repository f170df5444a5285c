"""What lies between a layer's matrix products, each one C call over FP32 rows: torch takes three to nine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from impls.native.build import load, num_threads
from impls.native.linear import describe


@cache
def _function(name: str, pointers: int, sizes: int, *floats: type) -> Callable[..., Any]:
    function: ctypes._NamedFuncPointer = getattr(load(), name)
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes + [*floats, ctypes.c_int]
    function.restype = None
    return function


def _check_rows(name: str, x: Tensor) -> None:
    if x.dtype != torch.float32 or not x.is_cpu or x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(f"{name} must be FP32 [rows, K] on the CPU, dense in K, not {describe(x)}")


def _check_dense(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.dtype != torch.float32 or not x.is_cpu or x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous FP32 {list(shape)} on the CPU, not {describe(x)}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: FP32 [rows, K] (rows may lie apart) and [K] to contiguous [rows, K].

    ValueError for any other dtype, shape or layout; `build.NativeUnavailable` without a compiler.
    """
    _check_rows("x", x)
    return _rms_norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x += residual`` in place, then `rms_norm` of x. x: contiguous FP32 [rows, K]; residual: its shape, rows may
    lie apart. ValueError for any other dtype, shape or layout.
    """
    _check_rows("residual", residual)
    _check_dense("x", x, residual.shape)
    return _rms_norm(x, residual, weight, eps)


def _rms_norm(x: Tensor, add: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, k = x.shape
    _check_dense("weight", weight, (k,))
    out = torch.empty(rows, k)
    add_pointer, add_stride = (None, 0) if add is None else (add.data_ptr(), add.stride(0))
    _function("rms_norm", 4, 4, ctypes.c_float)(
        x.data_ptr(), add_pointer, weight.data_ptr(), out.data_ptr(), rows, k, x.stride(0), add_stride, eps,
        num_threads(),
    )  # fmt: skip
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: FP32 [rows, 2 * K], gate first (rows may lie apart), to contiguous [rows, K].

    ValueError for any other dtype, shape or layout.
    """
    _check_rows("gate_up", gate_up)
    rows, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up must hold as many gates as ups, not {width} columns")
    out = torch.empty(rows, width // 2)
    _function("silu_and_mul", 2, 3)(
        gate_up.data_ptr(), out.data_ptr(), rows, width // 2, gate_up.stride(0), num_threads()
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + swap_halves(x) * sin: FP32 [T, heads, D] (any strides but D's) to contiguous [T, heads, D].

    cos, sin: contiguous FP32 [T, 1, D], the first half of sin negated. ValueError for any other dtype, shape or layout.
    """
    if x.dtype != torch.float32 or not x.is_cpu or x.dim() != 3 or x.stride(2) != 1 or x.shape[2] % 2:
        raise ValueError(f"x must be FP32 [T, heads, D] on the CPU, dense in an even D, not {describe(x)}")
    rows, heads, dim = x.shape
    _check_dense("cos", cos, (rows, 1, dim))
    _check_dense("sin", sin, (rows, 1, dim))
    out = torch.empty(rows, heads, dim)
    _function("rotate", 4, 5)(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), rows, heads, dim, x.stride(0), x.stride(1),
        num_threads(),
    )  # fmt: skip
    return out
