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
    expected = (-(-out_features // PANEL), (x.shape[1] + 1) // 2, PANEL, 2)
    if packed.dtype != weight_dtype or packed.shape != expected or not packed.is_contiguous():
        raise ValueError(
            f"the weight must be {weight_dtype} from pack_panels, {list(expected)}, not {describe(packed)}"
        )
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (out_features,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous FP32 [{out_features}], not {describe(bias)}")


def describe(x: Tensor) -> str:
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
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.impls_native.linear_bf16(x, packed, out_features, bias)
        return result
    _check(x, packed, out_features, bias, torch.bfloat16)
    rows, k = x.shape
    out = torch.empty(rows, out_features)
    if not rows:
        return out
    pointer = None if bias is None else bias.data_ptr()
    _linear_bf16()(x.data_ptr(), packed.data_ptr(), pointer, out.data_ptr(), rows, out_features, k, num_threads())
    return out


def _output_shape(x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


# What torch.compile traces in place of a call through ctypes, which it cannot see into.
torch.library.define("impls_native::linear_bf16", "(Tensor x, Tensor packed, int out_features, Tensor? bias) -> Tensor")
torch.library.impl("impls_native::linear_bf16", "CPU", linear_bf16)
torch.library.register_fake("impls_native::linear_bf16", _output_shape)
