"""Linear layers of 8, 4, 3 or 2 bits a weight on the C kernel: FP32 activations, a scale and an offset a group."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from impls.native.build import load, num_threads
from impls.native.linear import PANEL, describe

BITS = (8, 4, 3, 2)
GROUPS = (32, 64, 128)  # or the whole row
BLOCK_ROWS = PANEL * 256  # packed at a time: a field takes four bytes meanwhile
PIECE = 128  # of `linear_grouped.c`: three-bit words alternate by pieces of at most so many k


def _planes(bits: int) -> tuple[tuple[int, int], ...]:
    """(bits of a field, the bit of the value that it begins at) of each word in turn."""
    return ((2, 0), (1, 2)) if bits == 3 else ((bits, 0),)


def _padded(in_features: int, bits: int) -> int:
    unit = 32 // min(size for size, _ in _planes(bits))
    return -(-in_features // unit) * unit


def _pieces(padded: int, group_size: int, bits: int) -> list[int]:
    """Lengths in k of what a plane's words cover before the next plane's follow."""
    if bits != 3:
        return [padded]
    piece = min(-(-group_size // 32) * 32, PIECE)
    return [min(piece, padded - start) for start in range(0, padded, piece)]


def pack_fields(values: Tensor, bits: int, group_size: int) -> Tensor:
    """uint8 [N, K], each under 2^bits, to the kernel's words, int32 [ceil(N/16), words, 16]; K is padded with zeros."""
    blocks = [_pack_block(block, bits, group_size) for block in torch.split(values, BLOCK_ROWS)]
    return torch.cat(blocks)


def _pack_block(values: Tensor, bits: int, group_size: int) -> Tensor:
    n, k = values.shape
    padded = _padded(k, bits)
    wide = torch.zeros(-(-n // PANEL) * PANEL, padded, dtype=torch.int32, device=values.device)
    wide[:n, :k] = values
    parts = []
    for piece in torch.split(wide, _pieces(padded, group_size, bits), dim=1):
        for size, begin in _planes(bits):
            fields = (piece >> begin & (1 << size) - 1).view(len(wide), -1, 32 // size)
            shifts = torch.arange(0, 32, size, dtype=torch.int32, device=values.device)
            parts.append((fields << shifts).sum(-1, dtype=torch.int32))  # the highest field may set the sign
    words = torch.cat(parts, dim=1)
    return words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()


def unpack_fields(words: Tensor, bits: int, group_size: int, in_features: int) -> Tensor:
    """int32 [N, words], one channel a row, to uint8 [N, in_features]: the inverse of `pack_fields` for these rows."""
    pieces, at = [], 0
    for length in _pieces(_padded(in_features, bits), group_size, bits):
        piece = torch.zeros(len(words), length, dtype=torch.int32, device=words.device)
        for size, begin in _planes(bits):
            part = words[:, at : at + length * size // 32]
            at += part.shape[1]
            shifts = torch.arange(0, 32, size, dtype=torch.int32, device=words.device)
            piece |= (part[:, :, None] >> shifts & (1 << size) - 1).reshape(len(words), length) << begin
        pieces.append(piece)
    return torch.cat(pieces, dim=1)[:, :in_features].to(torch.uint8)


def pack_scales(scale: Tensor, offset: Tensor) -> Tensor:
    """[N, G] each, rounded to FP16, to int32 [ceil(N/16), G, 16]: the scale in the low half, the offset in the high."""
    n, groups = scale.shape
    halves = torch.zeros(-(-n // PANEL) * PANEL, groups, 2, dtype=torch.float16, device=scale.device)
    halves[:n, :, 0], halves[:n, :, 1] = scale, offset
    return halves.view(torch.int32).view(-1, PANEL, groups).transpose(1, 2).contiguous()


def unpack_scales(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [N, G], one channel a row, to FP32 scale and offset [N, G]."""
    halves = pairs.contiguous().view(torch.float16).view(*pairs.shape, 2).float()
    return halves[..., 0], halves[..., 1]


def channels(packed: Tensor, ids: Tensor) -> Tensor:
    """Rows ``ids`` (int64 [T]) of [ceil(N/16), L, 16], as [T, L]."""
    return packed[ids // PANEL, :, ids % PANEL]


@cache
def _function(name: str, sizes: int, flags: int) -> Callable[..., Any]:
    function: ctypes._NamedFuncPointer = getattr(load(), name)
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * sizes + [ctypes.c_int] * flags
    function.restype = ctypes.c_int
    return function


def _check(
    x: Tensor, words: Tensor, scales: Tensor, out_features: int, bits: int, group_size: int, bias: Tensor | None
) -> None:
    if x.dtype != torch.float32 or not x.is_cpu or x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"x must be contiguous FP32 [rows, K] on the CPU, not {describe(x)}")
    k = x.shape[1]
    if bits not in BITS or not (group_size == k or (group_size in GROUPS and k % group_size == 0)):
        raise ValueError(f"no kernel for {bits} bits in groups of {group_size} of {k}")
    panels = -(-out_features // PANEL)
    for name, tensor, length in (
        ("words", words, _padded(k, bits) * bits // 32),
        ("scales", scales, k // group_size),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != (panels, length, PANEL) or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32 {[panels, length, PANEL]}, not {describe(tensor)}")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (out_features,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous FP32 [{out_features}], not {describe(bias)}")


def linear_grouped(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    out_features: int,
    *,
    bits: int,
    group_size: int,
    zero_point: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """x [rows, K] FP32 times W transposed, W = scale * value + offset by groups of k, accumulated in FP32.

    words: `pack_fields`; scales: `pack_scales`; zero_point: W = scale * (value - offset). group_size: one of `GROUPS`
    that divides K, or K. FP32 [rows, out_features]. ValueError for any other dtype, shape or layout.
    """
    _check(x, words, scales, out_features, bits, group_size, bias)
    rows, k = x.shape
    out = torch.empty(rows, out_features)
    if rows:
        pointers = (x.data_ptr(), words.data_ptr(), scales.data_ptr(), None if bias is None else bias.data_ptr())
        sizes = (rows, out_features, k, group_size, bits, int(zero_point))
        if _function("linear_grouped", 4, 3)(*pointers, out.data_ptr(), *sizes, num_threads()):
            raise MemoryError("linear_grouped: out of memory")
    return out


def linear_w4a8(
    x: Tensor, words: Tensor, scales: Tensor, out_features: int, *, group_size: int, bias: Tensor | None = None
) -> Tensor:
    """`linear_grouped` of 4 bits, and x too in integers: each row as `linear.quantize_int8` rounds it, the products of
    a group exact. Arguments and errors as there."""
    _check(x, words, scales, out_features, 4, group_size, bias)
    rows, k = x.shape
    out = torch.empty(rows, out_features)
    if rows:
        pointers = (x.data_ptr(), words.data_ptr(), scales.data_ptr(), None if bias is None else bias.data_ptr())
        sizes = (rows, out_features, k, group_size)
        if _function("linear_w4a8", 4, 1)(*pointers, out.data_ptr(), *sizes, num_threads()):
            raise MemoryError("linear_w4a8: out of memory")
    return out
