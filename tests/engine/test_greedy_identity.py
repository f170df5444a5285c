"""FP32 greedy tokens are the same whatever schedules, stores or drafts them (DESIGN section 6, Equivalence).

Any two options meet in some arm here; all combinations: scripts/identity_full.py.
"""

from __future__ import annotations

import random

import pytest
from identity import AXES, BATCHED_TOKENS, NUM_LAYERS, SHAPE, combination, compatible, covering, pairs, reasons
from identity_runs import check, first_layers, one_model_for_all, oracle

COVERING = covering()


@pytest.fixture(scope="module")
def source(real_model):
    shortened = first_layers(real_model, NUM_LAYERS)
    assert shortened.shape == SHAPE, "what can run was decided by another shape"
    with one_model_for_all(shortened):
        yield shortened


@pytest.fixture(scope="module")
def expected(source):
    found = oracle(source)
    assert len({tuple(each.tokens) for each in found}) == len(found), "the oracle says the same to every prompt"
    assert min(len(each.prompt) for each in found) > max(BATCHED_TOKENS.values())
    return found


@pytest.mark.parametrize("combination", COVERING, ids="-".join)
def test_every_arm_gives_the_oracles_tokens(source, expected, combination):
    """``compiled`` is traced here and not built; what is built is compared in tests/execution."""
    check(combination, source, expected, backend="aot_eager")


def test_options_exclude_each_other_in_pairs_and_the_others_meet():
    """So two of them that never meet here cannot, whatever else is chosen."""
    assert set().union(*map(pairs, COVERING)) == compatible()
    rng = random.Random(1)
    for _ in range(300):
        row = tuple(rng.choice(options) for options in AXES.values())
        assert (not reasons(row)) == (pairs(row) <= compatible()), f"{row}: {reasons(row)}"


def test_whole_model(real_model):
    """All 30 layers: what they carry over long paths, in the arms where most of the engine takes part."""
    with one_model_for_all(real_model):
        found = oracle(real_model)
        for options in (
            {"batching": "chunked_prefill", "preemption": "swap", "prefix": "radix", "proposer": "layer_skip"}
            | {"attention": "native"},
            {"prefix": "hash_chain", "proposer": "draft_model", "attention": "sdpa"},
            {"batching": "static", "kv_cache": "contiguous", "proposer": "ngram", "attention": "sdpa"},
        ):
            row = combination(**options)
            if not reasons(row):
                check(row, real_model, found, tight=64)
