"""The Triton kernel against the reference. Run as a script by test_triton.py, which sets the interpreter before Triton
is imported (`case_scripts`). On a machine with CUDA it runs compiled."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable

import case_scripts
import torch
from attention_steps import DECODE, MIXED, Step, in_8_bits, model_shape, tolerance

from impls.attention.triton_paged import TritonAttention

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TINY = model_shape(3, 1, 64)


def run(step: Step, num_splits: int = 4) -> torch.Tensor:
    return step.run(TritonAttention(step.shape, step.device, num_splits=num_splits))


def check(lens: list[tuple[int, int]], *, num_splits: int = 4, dtype: torch.dtype = torch.float32, **options) -> None:
    step = Step(lens, dtype=dtype, device=DEVICE, **options)
    torch.testing.assert_close(run(step, num_splits), step.reference(), **tolerance(dtype))


def mixed_step_over_pages():
    check(MIXED, block_size=16)


def mixed_step_over_one_large_block_each():
    check(MIXED, block_size=256, shape=TINY)


def mixed_step_in_bf16():
    check(MIXED, block_size=16, dtype=torch.bfloat16, shape=TINY)


def head_dim_128_and_group_of_four():
    check([(1, 20), (9, 30)], block_size=16, shape=model_shape(4, 1, 128))


def head_dim_128_in_bf16():
    check([(1, 20), (9, 30)], block_size=16, shape=model_shape(4, 1, 128), dtype=torch.bfloat16)


def head_dim_that_is_no_power_of_two_and_no_grouping():
    check([(1, 20), (9, 30)], block_size=16, shape=model_shape(1, 1, 80))


def group_larger_than_a_tile():
    check([(1, 20), (5, 30)], block_size=16, shape=model_shape(71, 1, 16))


def block_size_that_is_no_power_of_two():
    check([(1, 33), (20, 50)], block_size=12, shape=TINY)


def queries_wider_than_the_cache():
    check([(1, 33), (20, 50)], block_size=16, shape=TINY, cache_dtype=torch.bfloat16)


def check_8_bits(lens: list[tuple[int, int]], kept: torch.dtype, layout: str = "plain", **options) -> None:
    """The kernel on 8 bits against the reference on the numbers that they stand for."""
    step = Step(lens, block_size=16, device=DEVICE, **{"shape": TINY} | options)
    for poison in (math.nan, math.inf):
        scaled, wide = in_8_bits(step, kept, layout, poison)
        torch.testing.assert_close(run(scaled), wide.reference(), **tolerance(step.q.dtype))


def int8_cache():
    check_8_bits([(1, 33), (5, 40), (0, 12), (17, 60)], torch.int8, shape=model_shape())


def fp8_cache():
    check_8_bits(MIXED, torch.float8_e4m3fn)


def split_decode_over_int8():
    check_8_bits(DECODE[-3:], torch.int8)


def split_decode_over_fp8():
    check_8_bits(DECODE[1:4], torch.float8_e4m3fn)


def bf16_queries_over_int8():
    check_8_bits([(1, 33), (20, 50)], torch.int8, dtype=torch.bfloat16)


def bf16_queries_over_fp8():
    check_8_bits([(1, 33), (20, 50)], torch.float8_e4m3fn, dtype=torch.bfloat16)


def interleaved_and_heads_first_8_bits():
    check_8_bits([(1, 33), (20, 50)], torch.int8, "interleaved")
    check_8_bits([(1, 33), (20, 50)], torch.float8_e4m3fn, "heads_first")


def every_e4m3_number_is_what_torch_says():
    """As values behind a single key each: what comes out is the value itself."""
    every = [n for n in range(256) if n & 0x7F != 0x7F]
    step = Step([(1, 1)] * 4, block_size=1, shape=model_shape(1, 1, 64), device=DEVICE)
    scaled, _ = in_8_bits(step, torch.float8_e4m3fn)
    bits = torch.tensor([*every, 0, 0], dtype=torch.uint8, device=DEVICE).view(4, 1, 64)
    scaled.v.values.view(torch.uint8)[step.written] = bits
    scaled.v.scales[step.written] = 1.0
    assert torch.equal(run(scaled), bits.view(torch.float8_e4m3fn).float())


def interleaved_cache():
    check([(1, 33), (20, 50)], block_size=16, shape=TINY, layout="interleaved")


def heads_first_cache():
    check([(1, 33), (20, 50)], block_size=16, shape=TINY, layout="heads_first")


def split_decode():
    check(DECODE, block_size=16)


def split_decode_over_one_large_block_each():
    check(DECODE, block_size=256, shape=TINY)


def split_decode_of_a_long_context():
    check([(1, 1500), (1, 3)], block_size=16, num_splits=8, shape=TINY)


def split_decode_in_bf16():
    check([(1, 150), (1, 3)], block_size=16, shape=TINY, dtype=torch.bfloat16)


def unsplit_decode():
    check(DECODE, block_size=16, num_splits=1, shape=TINY)


def length_zero_row_gives_zeros():
    for num_splits in (1, 4):
        step = Step([(1, 40), (1, 0), (1, 7)], block_size=16, shape=TINY, device=DEVICE)
        out = run(step, num_splits)
        assert torch.equal(out[1], torch.zeros_like(out[1]))
        torch.testing.assert_close(out, step.reference(), **tolerance(torch.float32))


def unwritten_slots_change_no_bit():
    for lens in ([(1, 5), (7, 23)], [(1, 5), (1, 23)]):
        outputs = []
        for poison in (0.0, math.nan, math.inf):
            step = Step(lens, block_size=16, poison=poison, shape=TINY, device=DEVICE)
            outputs.append(run(step))
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])
        assert bool(outputs[0].isfinite().all())


def chunks_equal_the_whole_prompt():
    whole = Step([(30, 30)], block_size=16, shape=TINY, device=DEVICE)
    expected = run(whole)
    for first, last in ((0, 11), (11, 12), (12, 30)):
        part = Step([(last - first, last)], block_size=16, shape=TINY, device=DEVICE)
        part.k, part.v, part.q = whole.k, whole.v, whole.q[first:last]
        part.batch.block_table = whole.batch.block_table
        torch.testing.assert_close(run(part), expected[first:last])


def strided_queries():
    """The model's q is a slice of its fused qkv rows."""
    step = Step([(1, 20), (4, 9)], block_size=16, shape=TINY, device=DEVICE)
    expected = run(step)
    fused = torch.cat((step.q, torch.full_like(step.q, math.nan)), dim=1)
    step.q = fused[:, : step.shape.num_heads]
    assert torch.equal(run(step), expected)


def scratch_of_a_larger_split_step_does_not_leak():
    """An empty split must be written too: the buffers still hold the last step's partial results."""
    large = Step([(1, 200), (1, 180)], block_size=16, shape=TINY, device=DEVICE)
    backend = TritonAttention(large.shape, large.device, num_splits=4)
    large.run(backend)
    small = Step([(1, 3), (1, 2)], block_size=16, shape=TINY, device=DEVICE)
    torch.testing.assert_close(small.run(backend), small.reference(), **tolerance(torch.float32))


def block_offsets_pass_two_to_the_31():
    """Blocks spread over 4 GiB of addresses, almost none of them touched: block 2 begins at element 2^31."""
    step = Step([(1, 20), (3, 10)], block_size=16, shape=TINY, dtype=torch.bfloat16, shuffle=False, device=DEVICE)
    expected = run(step)
    stride = 2**30
    far = virtual_bf16(2 * stride + step.k[0].numel()).as_strided(
        (3, *step.k.shape[1:]), (stride, *step.k.stride()[1:])
    )
    for name in ("k", "v"):
        near = getattr(step, name)
        far.copy_(near[:3])
        setattr(step, name, far)
        assert torch.equal(run(step), expected)
        setattr(step, name, near)


def virtual_bf16(elements: int) -> torch.Tensor:
    if DEVICE == "cuda":
        return torch.empty(elements, dtype=torch.bfloat16, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.bfloat16)


def every_block_of_every_ragged_step_is_found():
    """The numbering that the binary search inverts gives each sequence enough blocks, on shapes the grid bounds."""
    generator = torch.Generator().manual_seed(0)
    for block_q in (1, 5, 16):
        for _ in range(200):
            lens = torch.randint(0, 40, (int(torch.randint(1, 12, (1,), generator=generator)),), generator=generator)
            starts = torch.cat((torch.zeros(1, dtype=torch.long), lens.cumsum(0))).tolist()
            grid = starts[-1] // block_q + len(lens)
            first = [s + start // block_q for s, start in enumerate(starts)]
            for s, length in enumerate(lens.tolist()):
                assert first[s + 1] - first[s] >= math.ceil(length / block_q)
            assert first[len(lens)] == grid


CASES: list[Callable[[], None]] = [
    mixed_step_over_pages,
    mixed_step_over_one_large_block_each,
    mixed_step_in_bf16,
    head_dim_128_and_group_of_four,
    head_dim_128_in_bf16,
    head_dim_that_is_no_power_of_two_and_no_grouping,
    group_larger_than_a_tile,
    block_size_that_is_no_power_of_two,
    queries_wider_than_the_cache,
    int8_cache,
    fp8_cache,
    split_decode_over_int8,
    split_decode_over_fp8,
    bf16_queries_over_int8,
    bf16_queries_over_fp8,
    interleaved_and_heads_first_8_bits,
    every_e4m3_number_is_what_torch_says,
    interleaved_cache,
    heads_first_cache,
    split_decode,
    split_decode_over_one_large_block_each,
    split_decode_of_a_long_context,
    split_decode_in_bf16,
    unsplit_decode,
    length_zero_row_gives_zeros,
    unwritten_slots_change_no_bit,
    chunks_equal_the_whole_prompt,
    strided_queries,
    scratch_of_a_larger_split_step_does_not_leak,
    block_offsets_pass_two_to_the_31,
    every_block_of_every_ragged_step_is_found,
]


if __name__ == "__main__":
    assert DEVICE == "cpu" or torch.cuda.is_available()
    case_scripts.run(CASES)
