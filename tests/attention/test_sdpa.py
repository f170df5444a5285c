from __future__ import annotations

import math

import pytest
import torch
from attention_steps import DECODE, MIXED, Step, model_shape, tolerance
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from impls.attention.sdpa import MIN_GROUP, MIN_VIEW, SDPAAttention, as_slice, partition

CONTIGUOUS = 128


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["plain", "interleaved", "heads_first"])
@pytest.mark.parametrize("block_size", [16, CONTIGUOUS])
@pytest.mark.parametrize("lens", [MIXED, DECODE, [(40, 40)], [(1, 50)], [(3, 9)] * 4], ids=str)
def test_matches_the_reference(lens, block_size, layout, dtype):
    step = Step(lens, block_size=block_size, layout=layout, dtype=dtype)
    torch.testing.assert_close(step.run(step.backend(SDPAAttention)), step.reference(), **tolerance(dtype))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (8, 1, 128), (9, 3, 64)])
def test_matches_the_reference_at_other_head_shapes(heads, kv_heads, dim):
    step = Step(MIXED, block_size=16, shape=model_shape(heads, kv_heads, dim))
    torch.testing.assert_close(step.run(step.backend(SDPAAttention)), step.reference(), **tolerance(torch.float32))


@pytest.mark.parametrize("block_size", [16, CONTIGUOUS])
def test_queries_may_be_wider_than_the_cache(block_size):
    step = Step([*MIXED, (1, 64)], block_size=block_size, dtype=torch.float32, cache_dtype=torch.bfloat16)
    torch.testing.assert_close(step.run(step.backend(SDPAAttention)), step.reference(), **tolerance(torch.float32))


@pytest.mark.parametrize("lens", [MIXED, DECODE, [(40, 40)], [(1, 50)] * 3], ids=str)
@pytest.mark.parametrize("block_size", [16, CONTIGUOUS])
def test_what_lies_in_unwritten_slots_changes_no_bit(lens, block_size):
    outputs = []
    for poison in (0.0, math.nan, math.inf, 1e30):
        step = Step(lens, block_size=block_size, poison=poison)
        outputs.append(step.run(step.backend(SDPAAttention)))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert bool(outputs[0].isfinite().all())


@pytest.mark.parametrize("chunk", [1, 5, 24])
def test_a_prompt_in_chunks_equals_the_whole(chunk):
    length = 48
    whole = Step([(length, length)], block_size=16, seed=3)
    expected = whole.run(whole.backend(SDPAAttention))
    for first in range(0, length, chunk):
        last = min(first + chunk, length)
        part = Step([(last - first, last)], block_size=16, seed=3)
        part.k, part.v, part.q = whole.k, whole.v, whole.q[first:last]
        part.batch.block_table = whole.batch.block_table
        torch.testing.assert_close(part.run(part.backend(SDPAAttention)), expected[first:last])


def test_contiguous_sequences_of_equal_length_are_read_in_place():
    step = Step([(1, 70)] * 5, block_size=CONTIGUOUS, shuffle=False)
    backend = SDPAAttention(step.shape, step.device)
    torch.testing.assert_close(step.run(backend), step.reference(), **tolerance(torch.float32))
    assert backend.gathered_bytes(step.batch) == 0


def test_contiguous_sequences_of_unequal_length_are_not():
    """A view over neighbouring blocks would reach past the end of the shorter sequences."""
    step = Step([(1, 70), (1, 20), (1, 45)], block_size=CONTIGUOUS, shuffle=False)
    torch.testing.assert_close(step.run(step.backend(SDPAAttention)), step.reference(), **tolerance(torch.float32))


@pytest.mark.parametrize("layout", ["plain", "interleaved", "heads_first"])
def test_no_layout_makes_it_copy_the_whole_cache(layout):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                self.numel = max(self.numel, out.numel())
            return out

    step = Step([(1, 20), (4, 33)], block_size=16, layout=layout)
    with Largest() as seen:
        step.run(step.backend(SDPAAttention))
    assert 0 < seen.numel <= step.k.numel() // 2


def test_gathered_bytes_counts_every_copied_position_in_every_layer():
    step = Step([(1, 20), (1, 30)], block_size=16, shape=model_shape(6, 2, 64, num_layers=7))
    backend = SDPAAttention(step.shape, step.device)
    step.run(backend)
    padded = 2 * 30
    assert backend.gathered_bytes(step.batch) == 7 * 2 * padded * 2 * 64 * 4
    narrow = Step([(1, 20), (1, 30)], block_size=16, cache_dtype=torch.bfloat16)
    backend = SDPAAttention(narrow.shape, narrow.device)
    narrow.run(backend)
    assert backend.gathered_bytes(narrow.batch) == 2 * padded * 2 * 64 * (2 + 4)


def test_rows_of_a_sequence_without_keys_are_zero():
    """A padded row of a captured decode batch has length 0; its output must be finite."""
    step = Step([(1, 20), (1, 0), (1, 9)], block_size=16)
    out = step.run(step.backend(SDPAAttention))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    torch.testing.assert_close(out, step.reference(), **tolerance(torch.float32))


def test_buffers_serve_steps_in_and_out_of_inference_mode():
    small, large = Step([(1, 20)], block_size=16), Step([(1, 90)] * 3, block_size=16)
    backend = SDPAAttention(small.shape, small.device)
    with torch.inference_mode():
        small.run(backend)
        large.run(backend)
    torch.testing.assert_close(small.run(backend), small.reference(), **tolerance(torch.float32))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), max_size=60),
    st.booleans(),
)
@settings(max_examples=60)
def test_partition_puts_every_running_sequence_in_one_group_of_equal_queries(pairs, one_block):
    query_lens = [q for q, _ in pairs]
    kv_lens = [q + past for q, past in pairs]
    groups = partition(query_lens, kv_lens, one_block=one_block)
    flat = sorted(i for members in groups for i in members)
    assert flat == [i for i, (q, kv) in enumerate(zip(query_lens, kv_lens, strict=True)) if q and kv]
    for members in groups:
        assert members == sorted(members)
        assert len({query_lens[i] for i in members}) == 1


def test_partition_cuts_ragged_lengths_but_not_small_batches():
    assert partition([1] * 4, [300, 32, 200, 90], one_block=False) == [[0, 1, 2, 3]]
    lengths = [32] * MIN_GROUP + [300] * MIN_GROUP
    assert [len(g) for g in partition([1] * len(lengths), lengths, one_block=False)] == [MIN_GROUP, MIN_GROUP]
    assert len(partition([1] * 64, [100] * 64, one_block=False)) == 1
    assert len(partition([1] * 2, [MIN_VIEW, MIN_VIEW + 1], one_block=True)) == 2


def test_as_slice_lists_exactly_the_blocks():
    assert as_slice([4]) == slice(4, 5, 1)
    assert list(range(20))[as_slice([2, 5, 8])] == [2, 5, 8]
    assert as_slice([3, 2]) is None
    assert as_slice([1, 1]) is None
    assert as_slice([1, 2, 4]) is None
