"""Whose keys are split, in the interpreter. Run as a script by test_triton_splits.py (`case_scripts`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import case_scripts
import torch
from attention_steps import Step, in_8_bits, model_shape, tolerance

from impls.attention.triton_paged import MAX_SPLIT_QUERIES, SPLIT_PROGRAMS, TritonAttention, tile

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TINY = model_shape(3, 1, 64)


def check(lens: list[tuple[int, int]], splits: int, num_splits: int = 4, **options) -> None:
    """Against the reference, and that so many splits were used."""
    step = Step(lens, block_size=16, device=DEVICE, **{"shape": TINY} | options)
    backend = TritonAttention(step.shape, step.device, num_splits=num_splits)
    torch.testing.assert_close(step.run(backend), step.reference(), **tolerance(step.q.dtype))
    assert backend._splits == splits


def one_sequence_that_verifies_drafts():
    check([(4, 300)], splits=4)


def decodes_and_drafts_of_uneven_length():
    check([(1, 70), (4, 100), (3, 3), (2, 33)], splits=4, shape=model_shape())


def more_rows_than_a_tile_of_sixteen():
    check([(9, 90), (1, 20)], splits=4)


def many_queries_are_not_split():
    check([(MAX_SPLIT_QUERIES + 1, 60), (1, 70)], splits=1)


def as_many_as_may_be_split():
    check([(MAX_SPLIT_QUERIES, 60)], splits=4)


def nothing_is_split_into_one():
    check([(4, 100)], splits=1, num_splits=1)


def drafts_over_8_bits():
    step = Step([(4, 100), (1, 40)], block_size=16, shape=TINY, device=DEVICE)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        scaled, wide = in_8_bits(step, dtype, poison=math.nan)
        out = scaled.run(TritonAttention(step.shape, step.device, num_splits=4))
        torch.testing.assert_close(out, wide.reference(), **tolerance(torch.float32))


def splits_depend_on_query_blocks_and_kv_heads():
    shape = model_shape(6, 2, 64)
    backend = TritonAttention(shape, torch.device(DEVICE), num_splits=4)
    block_q = tile(4, 3, 64, 2)[0] // 3
    assert block_q == 5  # of drafts and the token before them: one block a sequence
    most = SPLIT_PROGRAMS // 2

    def splits(lens: list[tuple[int, int]]) -> int:
        return backend.splits_of(Step(lens, block_size=16, shape=shape, device=DEVICE).batch, 2)

    assert [splits([(1, 9)] * count) for count in (1, most, most + 1)] == [4, 4, 1]
    assert [splits([(4, 9)] * count) for count in (1, most, most + 1)] == [4, 4, 1]
    assert splits([(1, 9)] * most + [(1, 0)] * 9) == 4, "what pads a graph's bucket does no work"


def variants_are_compiled_without_keys():
    """On a GPU at the first step: whatever a later one may need, and nothing twice."""
    step = Step([(1, 20)], block_size=16, shape=TINY, device=DEVICE)
    backend = TritonAttention(step.shape, step.device, num_splits=4)
    backend.prepare(step.batch)
    launch, launched = backend._launch, []

    def watched(batch, splits, scratch, q, k_cache, v_cache):
        launched.append((tile(batch.max_query_len, 3, 64, 4), splits))
        return launch(batch, splits, scratch, q, k_cache, v_cache)

    backend._launch = watched
    backend.compile_variants(step.q, step.k, step.v)
    assert len(set(launched)) == len(launched)
    needed = set()
    for queries in range(1, 40):
        needed.add((tile(queries, 3, 64, 4), 1))
        if queries <= MAX_SPLIT_QUERIES:
            needed.add((tile(queries, 3, 64, 4), 4))
    assert set(launched) == needed


def partial_results_of_a_step_before_do_not_leak():
    backend = TritonAttention(TINY, torch.device(DEVICE), num_splits=4)
    for lens in ([(4, 200), (4, 180)], [(4, 5), (2, 2)]):
        step = Step(lens, block_size=16, shape=TINY, device=DEVICE)
        torch.testing.assert_close(step.run(backend), step.reference(), **tolerance(torch.float32))


CASES: list[Callable[[], None]] = [
    one_sequence_that_verifies_drafts,
    decodes_and_drafts_of_uneven_length,
    more_rows_than_a_tile_of_sixteen,
    many_queries_are_not_split,
    as_many_as_may_be_split,
    nothing_is_split_into_one,
    drafts_over_8_bits,
    splits_depend_on_query_blocks_and_kv_heads,
    variants_are_compiled_without_keys,
    partial_results_of_a_step_before_do_not_leak,
]


if __name__ == "__main__":
    assert DEVICE == "cpu" or torch.cuda.is_available()
    case_scripts.run(CASES)
