"""Paged attention in Triton: one kernel for prefill, chunks, decode and any mixture, and the merge of a split decode.

Grid of the main kernel: (query blocks, KV heads, splits). A query block holds BLOCK_Q consecutive tokens of a sequence
with all GROUP query heads of its KV head, so that a tile of keys is read once for all of them. The number of blocks is
bounded on the host from shapes alone; which sequence a block belongs to is found by binary search, so a captured graph
replays for any lengths. Online softmax in FP32, in powers of two. Keys and values of 8 bits are multiplied as they are:
the keys' scales go to the scores, the values' to the weights.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (The bodies of kernels are Triton, not Python: pointers and run-time scalars have no Python type.)

from __future__ import annotations

import torch
import triton
import triton.language as tl

OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """The Triton type in which q, k, p and v of this dtype are multiplied (always accumulated in FP32)."""
    return tl.float32 if triton.knobs.runtime.interpret else OPERANDS[dtype]


@triton.jit
def _sequence_of_block(query_start_ptr, block, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence s with s + query_start[s] // BLOCK_Q <= block < (s + 1) + query_start[s + 1] // BLOCK_Q.

    Numbering sequence s's blocks from s + query_start[s] // BLOCK_Q leaves each at least as many as it needs.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if middle + tl.load(query_start_ptr + middle) // BLOCK_Q <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _from_8_bits(x, FP8: tl.constexpr):
    """INT8, or the bytes of E4M3 (no NaN), as FP32. By arithmetic: not every GPU converts E4M3, and every one FP16."""
    if FP8:
        half = ((x & 0x80).to(tl.uint16) << 8) | ((x & 0x7F).to(tl.uint16) << 7)  # its bits where FP16 has its own
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0  # 2^(15 - 7): between the exponents' biases
    return x.to(tl.float32)


# These two change from step to step: a variant for each kind of number would be compiled in the middle of a run.
@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def paged_attention_kernel(
    q_ptr,  # [T, num_heads, head_dim]
    k_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_ptr,
    out_ptr,  # SPLITS == 1: as q. Else FP32 [T, num_heads, SPLITS, head_dim], not yet divided by its sum
    max_ptr,  # FP32 [T, num_heads, SPLITS], only written if SPLITS > 1; so is sum_ptr
    sum_ptr,
    k_scale_ptr,  # BF16 [num_blocks, block_size, num_kv_heads], read only if SCALED; so is v_scale_ptr
    v_scale_ptr,
    query_start_ptr,  # int32 [S + 1]
    seq_lens_ptr,  # int32 [S]
    block_table_ptr,  # int32 [S, max_blocks]
    num_seqs,
    scale_log2,  # 1 / sqrt(head_dim) x log2(e)
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    k_stride_d,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    v_stride_d,
    k_scale_stride_b,
    k_scale_stride_s,
    k_scale_stride_h,
    v_scale_stride_b,
    v_scale_stride_s,
    v_scale_stride_h,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,  # k and v are INT8, or the bytes of E4M3 if FP8
    FP8: tl.constexpr,
    OPERAND: tl.constexpr,  # what tl.dot multiplies; q's type, except in the interpreter, which cannot multiply BF16
):
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq = _sequence_of_block(query_start_ptr, tl.program_id(0), num_seqs, BLOCK_Q)
    query_begin = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_begin
    first = (tl.program_id(0) - seq - query_begin // BLOCK_Q) * BLOCK_Q  # this block's first token in the sequence
    if first >= query_len:
        return
    kv_len = tl.load(seq_lens_ptr + seq)

    m = tl.arange(0, BLOCK_M)
    token = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    row_valid = (m < BLOCK_Q * GROUP) & (token < query_len)
    position = kv_len - query_len + token
    row = (query_begin + token).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    d_valid = d < HEAD_DIM
    q = tl.load(
        q_ptr + row[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :],
        mask=row_valid[:, None] & d_valid[None, :],
        other=0.0,
    )
    element = q.dtype
    q = q.to(OPERAND)

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # The last token of the block sees the most keys; a split takes an equal share of their tiles.
    num_keys = tl.minimum(kv_len, kv_len - query_len + first + BLOCK_Q)
    tiles_per_split = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), SPLITS)
    begin = split * tiles_per_split * BLOCK_N
    end = tl.minimum(num_keys, begin + tiles_per_split * BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        n_valid = n < end
        block = tl.load(block_table_ptr + seq.to(tl.int64) * table_stride + n // BLOCK_SIZE, mask=n_valid, other=0)
        block = block.to(tl.int64)  # block x stride passes 2^31 in caches over 2 GiB elements
        slot = (n % BLOCK_SIZE).to(tl.int64)
        loadable = n_valid[:, None] & d_valid[None, :]  # slots past the end are never read: they may hold NaN
        k = tl.load(
            k_ptr + (block * k_stride_b + slot * k_stride_s + kv_head * k_stride_h)[:, None] + d[None, :] * k_stride_d,
            mask=loadable,
            other=0,
        )
        if SCALED:
            k = _from_8_bits(k, FP8)
        scores = tl.dot(q, tl.trans(k.to(element).to(OPERAND)), input_precision="ieee") * scale_log2
        if SCALED:
            at = block * k_scale_stride_b + slot * k_scale_stride_s + kv_head * k_scale_stride_h
            scores *= tl.load(k_scale_ptr + at, mask=n_valid, other=0.0).to(tl.float32)[None, :]
        scores = tl.where((n[None, :] <= position[:, None]) & n_valid[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet
        p = tl.math.exp2(scores - safe_max[:, None])
        rescale = tl.math.exp2(running_max - safe_max)
        running_sum = running_sum * rescale + tl.sum(p, 1)
        v = tl.load(
            v_ptr + (block * v_stride_b + slot * v_stride_s + kv_head * v_stride_h)[:, None] + d[None, :] * v_stride_d,
            mask=loadable,
            other=0,
        )
        if SCALED:
            v = _from_8_bits(v, FP8)
            at = block * v_scale_stride_b + slot * v_scale_stride_s + kv_head * v_scale_stride_h
            p *= tl.load(v_scale_ptr + at, mask=n_valid, other=0.0).to(tl.float32)[None, :]
        p = p.to(element).to(OPERAND)
        acc = acc * rescale[:, None] + tl.dot(p, v.to(element).to(OPERAND), input_precision="ieee")
        running_max = new_max

    out_valid = row_valid[:, None] & d_valid[None, :]
    if SPLITS == 1:
        acc = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]  # no key at all: zeros, not NaN
        out = out_ptr + row[:, None] * out_stride_t + head[:, None] * out_stride_h + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=out_valid)
    else:
        part = (row * (tl.num_programs(1) * GROUP) + head) * SPLITS + split
        tl.store(out_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, mask=out_valid)
        tl.store(max_ptr + part, running_max, mask=row_valid)
        tl.store(sum_ptr + part, running_sum, mask=row_valid)


@triton.jit
def merge_splits_kernel(
    part_ptr,  # FP32 [T, num_heads, SPLITS, head_dim]
    max_ptr,  # FP32 [T, num_heads, SPLITS]
    sum_ptr,
    out_ptr,  # [T, num_heads, head_dim]
    out_stride_t,
    out_stride_h,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (T, num_heads): bring the partial sums to their common maximum, add, divide."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = (row * tl.num_programs(1) + head) * SPLITS
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    d_valid = d < HEAD_DIM
    maxima = tl.load(max_ptr + first + split)
    overall = tl.max(maxima, 0)
    weight = tl.math.exp2(maxima - tl.where(overall == float("-inf"), 0.0, overall))  # an empty split weighs 0
    total = tl.sum(weight * tl.load(sum_ptr + first + split), 0)
    parts = tl.load(part_ptr + (first + split)[:, None] * HEAD_DIM + d[None, :], mask=d_valid[None, :], other=0.0)
    merged = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + row * out_stride_t + head * out_stride_h + d
    tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=d_valid)
