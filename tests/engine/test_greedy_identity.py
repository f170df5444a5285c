"""FP32 greedy tokens are the same whatever schedules, stores or drafts them (DESIGN section 6, Equivalence).

Any two options meet in some arm here; all combinations: scripts/identity_full.py.
"""

from __future__ import annotations

import itertools

import pytest
from identity import (
    AXES,
    BATCHED_TOKENS,
    NUM_LAYERS,
    SHAPE,
    check,
    covering,
    first_layers,
    one_model_for_all,
    oracle,
    product,
    reasons,
)

COVERING = covering(product())


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


def test_every_two_options_that_can_run_together_do():
    met = {pair for row in COVERING for pair in itertools.combinations(enumerate(row), 2)}
    for one, other in itertools.combinations(range(len(AXES)), 2):
        for a, b in itertools.product(*(list(AXES.values())[i] for i in (one, other))):
            if ((one, a), (other, b)) not in met:
                rows = (row for row in itertools.product(*AXES.values()) if row[one] == a and row[other] == b)
                assert all(reasons(row) for row in rows), f"{a} and {b} never meet"


def test_whole_model(real_model):
    """All 30 layers: what they carry over long paths, in the arms where most of the engine takes part."""
    with one_model_for_all(real_model):
        found = oracle(real_model)
        for row in (
            ("chunked_prefill", "swap", "paged", "radix", "layer_skip", "native", "eager", "off"),
            ("continuous", "recompute", "paged", "hash_chain", "draft_model", "sdpa", "eager", "off"),
            ("static", "recompute", "contiguous", "off", "ngram", "sdpa", "eager", "off"),
        ):
            if not reasons(row):
                check(row, real_model, found, tight=64)
