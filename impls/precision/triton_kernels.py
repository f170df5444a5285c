"""Products of grouped weights in Triton: packed words become a tile of small integers in registers, never in memory.

Grid of the main kernel: (channel blocks, row blocks, splits of K). A block of k lies within one group, so what is
multiplied are the integers as they are stored, which BF16 holds exactly (0..255), or INT8 where activations are INT8
too (0..15): a group's scale meets the sums of its products, its offset the sum of its inputs, both in FP32. The words
are those of `impls.native.grouped`; neighbouring channels of a panel lie beside each other, as a warp reads them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (The bodies of kernels are Triton, not Python: pointers and run-time scalars have no Python type.)

from __future__ import annotations

import torch
import triton
import triton.language as tl

PANEL = tl.constexpr(16)  # channels side by side, as in `impls.native.linear`
OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8: tl.int8}

# Which is fastest is found at a shape's first product. K is summed in the same order in all of them; within a block the
# number of warps may change the order, so last bits are the same within a process, not between two.
CONFIGS = [
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_N": 128}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_N": 32}, num_warps=4, num_stages=4),
]
if triton.knobs.runtime.interpret:  # which has no clock worth asking
    CONFIGS = CONFIGS[:1]


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """The Triton type in which activations of this dtype meet the weights."""
    interpreted = triton.knobs.runtime.interpret and dtype.is_floating_point  # it cannot multiply BF16
    return tl.float32 if interpreted else OPERANDS[dtype]


@triton.jit
def _fields(words_ptr, first, count, n_valid, BITS: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr):
    """int32 [WORDS * 32 / BITS, BLOCK_N]: what ``count`` words of each channel hold, from word ``first`` on; then 0."""
    word = tl.arange(0, WORDS)
    here = (word < count)[:, None] & n_valid[None, :]
    packed = tl.load(words_ptr[None, :] + (first + word)[:, None] * PANEL, mask=here, other=0)
    shift = tl.arange(0, 32 // BITS) * BITS
    fields = (packed[:, None, :] >> shift[None, :, None]) & ((1 << BITS) - 1)
    return tl.reshape(fields, (WORDS * (32 // BITS), BLOCK_N))


@triton.jit
def _half(bits):
    """The FP16 number in the low half of an int32, as FP32."""
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


# The number of rows changes from step to step: a variant for each kind of number would be compiled in mid-run.
@triton.autotune(configs=CONFIGS, key=["N", "K", "BITS", "BLOCK_M", "BLOCK_K", "SPLIT"])
@triton.jit(do_not_specialize=["num_rows"])
def grouped_linear_kernel(
    x_ptr,  # [num_rows, K]
    x_scale_ptr,  # FP32 [num_rows], only read if SCALED
    words_ptr,  # int32 [ceil(N / 16), num_words, 16]
    scales_ptr,  # int32 [ceil(N / 16), K / group_size, 16]: FP16 scale in the low half, FP16 offset in the high one
    bias_ptr,  # [N], only read if BIAS
    out_ptr,  # [num_rows, N]; FP32 [splits, num_rows, N] if SPLIT
    num_rows,
    N,
    K,
    group_size,
    num_words,
    BITS: tl.constexpr,
    ZERO_POINT: tl.constexpr,  # W = scale * (value - offset), not scale * value + offset
    SCALED: tl.constexpr,  # x is INT8
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # k that no group's end divides, a power of two from 32 on
    OPERAND: tl.constexpr,  # of tl.dot; x's own type, except in the interpreter
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_valid = n < N
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_valid = row < num_rows
    channel_words = words_ptr + (n // PANEL) * (num_words * PANEL) + n % PANEL
    channel_scales = scales_ptr + (n // PANEL) * (K // group_size * PANEL) + n % PANEL

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    num_blocks = tl.cdiv(K, BLOCK_K)
    blocks_per_split = tl.cdiv(num_blocks, tl.num_programs(2))
    begin = tl.program_id(2) * blocks_per_split
    for block in range(begin, tl.minimum(begin + blocks_per_split, num_blocks)):
        first = block * BLOCK_K
        word = block * (BLOCK_K * BITS // 32)
        if BITS == 3:  # two bits of each k, then the third of each
            length = tl.minimum(BLOCK_K, tl.cdiv(K, 32) * 32 - first)
            q = _fields(channel_words, word, length // 16, n_valid, 2, BLOCK_K // 16, BLOCK_N)
            q |= _fields(channel_words, word + length // 16, length // 32, n_valid, 1, BLOCK_K // 32, BLOCK_N) << 2
        else:
            q = _fields(channel_words, word, num_words - word, n_valid, BITS, BLOCK_K * BITS // 32, BLOCK_N)
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row[:, None] * K + k[None, :], mask=row_valid[:, None] & (k < K)[None, :], other=0)
        products = tl.dot(x.to(OPERAND), q.to(OPERAND), input_precision="ieee").to(tl.float32)
        pair = tl.load(channel_scales + first // group_size * PANEL, mask=n_valid, other=0)
        scale = _half(pair)
        offset = _half(pair >> 16)
        if ZERO_POINT:
            offset = -scale * offset
        acc += products * scale[None, :] + tl.sum(x.to(tl.float32), 1)[:, None] * offset[None, :]

    if SCALED:
        acc *= tl.load(x_scale_ptr + row, mask=row_valid, other=0.0)[:, None]
    valid = row_valid[:, None] & n_valid[None, :]
    if SPLIT:
        part = tl.program_id(2) * num_rows + row
        tl.store(out_ptr + part[:, None] * N + n[None, :], acc, mask=valid)
    else:
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n_valid, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + row[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_outputs", "splits"])
def add_splits_kernel(
    part_ptr,  # FP32 [splits, num_outputs]
    bias_ptr,  # [N], only read if BIAS
    out_ptr,  # [num_outputs]: rows of N
    num_outputs,
    N,
    splits,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """In the order of the splits, so that a sum is the same every time."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < num_outputs
    acc = tl.zeros([BLOCK], tl.float32)
    for split in range(0, splits):
        acc += tl.load(part_ptr + split * num_outputs + i, mask=valid, other=0.0)
    if BIAS:
        acc += tl.load(bias_ptr + i % N, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=valid)
