"""Linear layers of 8, 4, 3 or 2 bits a weight on the Triton kernel: the words of `impls.native.grouped`, on a GPU.

Tiles and splits were chosen by reading, not by timing: no GPU was at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impls.precision.triton_kernels import add_splits_kernel, grouped_linear_kernel, operand_type

FEW_ROWS = 16  # the smallest product of tensor cores: a step of so few rows only waits for the weights
SPLIT_ROWS = 64  # of a step that is a single block of rows; then K is split, or most of a large GPU would idle
PROGRAMS = 256  # two for each processor of a large GPU
LEAST_BLOCKS = 2  # of k in a split: it costs a pass over its partial sums
_compiled: set[tuple[object, ...]] = set()


def linear_grouped(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: bool,
    bias: Tensor | None,
    x_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x [rows, K] times W transposed, W = scale * value + offset by groups of k, to ``dtype`` [rows, out_features].

    words: `pack_fields`; scales: `pack_scales`; zero_point: W = scale * (value - offset); bias [out_features]. x: FP32,
    FP16 or BF16; or INT8 with x_scale, FP32 [rows], where W has at most 4 bits. Accumulated in FP32, the products of a
    group of INT8 in INT32. All contiguous, rows >= 1.
    """
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.impls_triton.linear_grouped(
            x, words, scales, out_features, bits, group_size, zero_point, bias, x_scale, dtype
        )
        return result
    rows, k = x.shape
    variant = (x.device, x.dtype, out_features, k, bits, group_size, zero_point, bias is None, dtype)
    if x.is_cuda and variant not in _compiled:
        # At a layer's first product, which is no measured one: every tile that a later step may need.
        _compiled.add(variant)
        for count in (FEW_ROWS, SPLIT_ROWS, 8 * SPLIT_ROWS):
            scale = None if x_scale is None else x_scale.new_ones(count)
            zeros = x.new_zeros(count, k)
            linear_grouped(zeros, words, scales, out_features, bits, group_size, zero_point, bias, scale, dtype)
    block_m, block_k, splits = tile(rows, out_features, k, group_size)
    split = splits > 1
    out = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    target = torch.empty(splits, rows, out_features, device=x.device) if split else out
    grouped_linear_kernel[lambda meta: (-(-out_features // meta["BLOCK_N"]), -(-rows // block_m), splits)](
        x,
        x if x_scale is None else x_scale,  # some pointer: it is not read then
        words,
        scales,
        x if bias is None else bias,
        target,
        rows,
        out_features,
        k,
        group_size,
        words.shape[1],
        BITS=bits,
        ZERO_POINT=zero_point,
        SCALED=x_scale is not None,
        BIAS=bias is not None,
        SPLIT=split,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        OPERAND=operand_type(x.dtype),
    )
    if split:
        add_splits_kernel[(-(-out.numel() // 256),)](
            target,
            x if bias is None else bias,
            out,
            out.numel(),
            out_features,
            splits,
            BIAS=bias is not None,
            BLOCK=256,
        )
    return out


def tile(rows: int, out_features: int, in_features: int, group_size: int) -> tuple[int, int, int]:
    """Rows and k of one program's block, and into how many parts K is split.

    A group is one block, or its blocks are of 128 k where it is a whole longer row. Splits depend on the layer alone
    for every step of at most `SPLIT_ROWS`; up to `FEW_ROWS`, where the tile is the same too, a row's sums do not depend
    on how many others share the step.
    """
    block_k = min(128, 1 << (max(group_size, 32) - 1).bit_length())
    if rows > SPLIT_ROWS:
        return 64, block_k, 1
    wanted = PROGRAMS // -(-out_features // 64)
    blocks = -(-in_features // block_k)
    splits = max(1, min(wanted, blocks // LEAST_BLOCKS))
    return 16 if rows <= FEW_ROWS else 64, block_k, splits


def _output_shape(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: bool,
    bias: Tensor | None,
    x_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(x.shape[0], out_features, dtype=dtype)


# What torch.compile traces in place of the launches: their tiles depend on the number of rows.
torch.library.define(
    "impls_triton::linear_grouped",
    "(Tensor x, Tensor words, Tensor scales, int out_features, int bits, int group_size, bool zero_point, Tensor? bias,"
    " Tensor? x_scale, ScalarType dtype) -> Tensor",
)
torch.library.impl("impls_triton::linear_grouped", "default", linear_grouped)
torch.library.register_fake("impls_triton::linear_grouped", _output_shape)
