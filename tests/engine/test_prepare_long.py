"""What a step of long sequences must not do: go through all of their tokens and blocks in Python."""

from __future__ import annotations

import pytest
import torch

from impls.in_flight import prepare
from impls.kv_cache.contiguous import ContiguousCache
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.reserved import ExactCache, Pow2Cache
from impls.request import Request, SamplingParams, Sequence
from impls.seams import ScheduledStep, StepStats

LENGTH = 100


class Long(list):
    """A sequence's tokens, of which no more than a few are copied at once."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        assert not isinstance(index, slice) or len(found) <= 4
        return found

    def __add__(self, other):
        raise AssertionError("copied whole")

    __iter__ = __add__


class Running:
    def __init__(self, sequence):
        self.running = [sequence]


class NoSwap:
    kept_bytes = 0


@pytest.mark.parametrize("cache", [PagedCache, ContiguousCache, ExactCache, Pow2Cache])
@pytest.mark.parametrize(("count", "expected"), [(1, [99]), (2, [99, 7]), (4, [99, 7, 8, 9])])
def test_a_step_takes_its_own_tokens_and_the_table_as_it_lies(cache, count, expected):
    size = {} if cache is ContiguousCache else {"block_size": 4}
    kv = cache(budget_bytes=256, bytes_per_token=1, max_model_len=128, **size)
    sequence = Sequence(Request("a", tuple(range(LENGTH)), SamplingParams(max_tokens=8)))
    assert kv.begin("a", range(LENGTH), LENGTH + 8) == 0 and kv.allocate("a", LENGTH + 4)
    sequence.token_ids = Long(sequence.token_ids)
    sequence.num_computed_tokens, sequence.draft_token_ids = LENGTH - 1, [7, 8, 9][: count - 1]
    step = ScheduledStep(num_scheduled_tokens={"a": count})
    flight = prepare(step, StepStats(0.0), {"a": sequence}, Running(sequence), kv, NoSwap(), torch.device("cpu"))
    assert flight.batch.input_ids.tolist() == expected
    assert flight.decoding == [sequence] and sequence.num_computed_tokens == LENGTH - 1 + count
    table = kv.block_table("a")
    assert flight.batch.block_table.tolist() == [list(table)]
    assert memoryview(table).format == "i", "an array of int32 is copied as it is"
