"""Properties of paired ratios over generated trials, nulls, zeros and infinities among them."""

from __future__ import annotations

import itertools
import math
from random import Random
from statistics import median

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from harness.statistics import ADAPTIVE_CONFIDENCE, CONFIDENCE, interval, order_statistic_rank, ratio

TOKENS = "output_tokens_per_s"
GOOD = st.floats(1e-6, 1e6)
USELESS = st.sampled_from([None, 0.0, -1.0, math.inf, math.nan])
TRIALS = st.dictionaries(st.integers(0, 9), GOOD | USELESS, min_size=4)
PAIRS = st.lists(st.tuples(GOOD, GOOD), min_size=2, max_size=20)


def sides(pairs: list[tuple[float, float]]) -> tuple[dict[int, float | None], dict[int, float | None]]:
    return {i: a for i, (a, _) in enumerate(pairs)}, {i: b for i, (_, b) in enumerate(pairs)}


def useful(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


@given(TRIALS, TRIALS, st.booleans())
def test_a_pair_without_two_useful_values_is_left_out(
    arm: dict[int, float | None], reference: dict[int, float | None], adaptive: bool
) -> None:
    kept = [t for t in arm if t in reference and useful(arm[t]) and useful(reference[t])]
    found = ratio(TOKENS, arm, reference, adaptive=adaptive)
    assert found.n == len(kept)
    assert found == ratio(TOKENS, {t: arm[t] for t in kept}, {t: reference[t] for t in kept}, adaptive=adaptive)
    if not kept:
        assert (found.median, found.verdict) == (None, "no difference shown")


@given(PAIRS, st.booleans())
def test_the_interval_contains_the_median_ratio(pairs: list[tuple[float, float]], adaptive: bool) -> None:
    found = ratio(TOKENS, *sides(pairs), adaptive=adaptive)
    assert found.median == pytest.approx(math.exp(median([math.log(a / b) for a, b in pairs])), rel=1e-9)
    assert found.low is not None and found.high is not None and found.median is not None
    assert found.low <= found.median <= found.high


@given(PAIRS, st.integers(-20, 20), st.booleans())
def test_the_unit_does_not_matter(pairs: list[tuple[float, float]], power: int, adaptive: bool) -> None:
    arm, reference = sides(pairs)
    scaled = [{t: v * 2.0**power for t, v in side.items() if v is not None} for side in (arm, reference)]
    plain, other = ratio(TOKENS, arm, reference, adaptive=adaptive), ratio(TOKENS, *scaled, adaptive=adaptive)
    assert other.n == plain.n and other.median == pytest.approx(plain.median, rel=1e-9)
    assert other.low == pytest.approx(plain.low, rel=1e-6) and other.high == pytest.approx(plain.high, rel=1e-6)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=20), st.floats(-3, 3), st.booleans())
def test_a_faster_arm_moves_the_whole_interval(logs: list[float], shift: float, adaptive: bool) -> None:
    """What the simulated power rests on."""
    reference: dict[int, float | None] = dict.fromkeys(range(len(logs)), 1.0)
    plain = ratio(TOKENS, {t: math.exp(x) for t, x in enumerate(logs)}, reference, adaptive=adaptive)
    faster = ratio(TOKENS, {t: math.exp(x + shift) for t, x in enumerate(logs)}, reference, adaptive=adaptive)
    for before, after in zip(
        (plain.low, plain.median, plain.high), (faster.low, faster.median, faster.high), strict=True
    ):
        assert before is not None and after is not None
        assert after == pytest.approx(before * math.exp(shift), rel=1e-6)


@given(PAIRS, st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_the_trials_does_not_matter(
    pairs: list[tuple[float, float]], random: Random, adaptive: bool
) -> None:
    mixed = random.sample(pairs, len(pairs))
    plain, other = ratio(TOKENS, *sides(pairs), adaptive=adaptive), ratio(TOKENS, *sides(mixed), adaptive=adaptive)
    assert other.median == pytest.approx(plain.median, rel=1e-12)
    assert other.low == pytest.approx(plain.low, rel=1e-9) and other.high == pytest.approx(plain.high, rel=1e-9)


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=6, max_size=9, unique=True),
    st.sampled_from([CONFIDENCE, ADAPTIVE_CONFIDENCE]),
)
def test_from_six_pairs_on_coverage_is_binomial_whatever_the_law(sizes: list[float], confidence: float) -> None:
    """Each value is above the true median or below it with probability 1/2: all 2^n ways, exactly."""
    n = len(sizes)
    k = order_statistic_rank(n, confidence)
    if k == 0:
        assert (n, confidence) == (6, ADAPTIVE_CONFIDENCE)
        return
    covered = 0
    for signs in itertools.product((-1, 1), repeat=n):
        low, high = interval([s * x for s, x in zip(signs, sizes, strict=True)], confidence) or (math.nan, math.nan)
        covered += low <= 0 <= high
    assert covered / 2**n == pytest.approx(1 - 2 * scipy.stats.binom.cdf(k - 1, n, 0.5), abs=1e-12)
    assert covered / 2**n >= confidence
