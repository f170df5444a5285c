"""Paired ratios by hand-computed values, by properties, and by a seeded simulation of their coverage."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from harness.statistics import (
    ADAPTIVE_CONFIDENCE,
    CONFIDENCE,
    T_QUANTILES,
    Ratio,
    direction,
    interval,
    order_statistic_rank,
    paired_log_ratios,
    ratio,
    verdict,
)

POSITIVE = st.floats(1e-6, 1e6)
TOKENS = "output_tokens_per_s"


def test_t_quantiles_are_students() -> None:
    for confidence, quantiles in T_QUANTILES.items():
        expected = scipy.stats.t.ppf((1 + confidence) / 2, range(1, len(quantiles) + 1))
        assert quantiles == pytest.approx(expected, rel=1e-12)
    assert len(T_QUANTILES[CONFIDENCE]) == 4 and len(T_QUANTILES[ADAPTIVE_CONFIDENCE]) == 5


def test_one_pair_has_a_median_and_no_interval() -> None:
    found = ratio(TOKENS, {0: 3.0}, {0: 2.0})
    assert (found.low, found.high, found.n, found.verdict) == (None, None, 1, "no difference shown")
    assert found.median == pytest.approx(1.5)


def test_three_pairs_by_hand() -> None:
    # logs ln 1.2, ln 1.5, ln 1.35: mean .295964, s .111629, half-width 4.302653 * s / sqrt 3 = .277303
    found = ratio(TOKENS, {0: 12.0, 1: 15.0, 2: 13.5}, {0: 10.0, 1: 10.0, 2: 10.0})
    assert found.median == pytest.approx(1.35)
    assert found.low == pytest.approx(1.018836, abs=1e-6) and found.high == pytest.approx(1.774053, abs=1e-6)
    assert (found.n, found.verdict) == (3, "better")
    assert ratio("ttft_s.p99", {0: 12.0, 1: 15.0, 2: 13.5}, {0: 10.0, 1: 10.0, 2: 10.0}).verdict == "worse"


def test_two_pairs_by_hand() -> None:
    # logs 0 and ln 4: mean ln 2, s = ln 4 / sqrt 2, half-width 12.706205 * ln 2
    found = ratio(TOKENS, {0: 1.0, 1: 4.0}, {0: 1.0, 1: 1.0})
    assert found.median == pytest.approx(2.0) and found.verdict == "no difference shown"
    assert found.high == pytest.approx(2.0 ** (1 + 12.706204736174698))


def test_two_pairs_that_disagree_wildly_have_an_endless_interval() -> None:
    found = ratio(TOKENS, {0: 1e6, 1: 1e-6}, {0: 1e-6, 1: 1e6}, adaptive=True)
    assert (found.low, found.high) == (0.0, math.inf) and found.median == pytest.approx(1.0)
    assert ratio(TOKENS, {0: 1e308}, {0: 1e-308}).median == math.inf


@pytest.mark.parametrize(
    ("n", "rank", "strict"), [(5, 0, 0), (6, 1, 0), (7, 1, 1), (8, 1, 1), (9, 2, 1), (11, 2, 2), (12, 3, 2), (20, 6, 5)]
)
def test_order_statistic_ranks_are_those_of_the_sign_test_tables(n: int, rank: int, strict: int) -> None:
    assert order_statistic_rank(n, CONFIDENCE) == rank
    assert order_statistic_rank(n, ADAPTIVE_CONFIDENCE) == strict


@pytest.mark.parametrize("confidence", [CONFIDENCE, ADAPTIVE_CONFIDENCE])
@pytest.mark.parametrize("n", range(7, 60))
def test_the_interval_is_the_narrowest_with_that_coverage(n: int, confidence: float) -> None:
    k = order_statistic_rank(n, confidence)
    assert 1 - 2 * scipy.stats.binom.cdf(k - 1, n, 0.5) >= confidence > 1 - 2 * scipy.stats.binom.cdf(k, n, 0.5)


def test_six_pairs_reach_from_the_least_to_the_most_and_nine_drop_one_on_each_side() -> None:
    values = [0.5, -0.1, 0.2, 0.3, 0.0, 0.4]
    assert interval(values) == (-0.1, 0.5)
    assert interval([*values, 9.0, -9.0, 0.1]) == (-0.1, 0.5)
    low, high = interval(values, ADAPTIVE_CONFIDENCE) or (0.0, 0.0)  # 98 %: still a t interval below n = 7
    half = 3.3649299989072174 * np.std(values, ddof=1) / math.sqrt(6)
    assert (low, high) == pytest.approx((np.mean(values) - half, np.mean(values) + half))


def test_adaptive_intervals_are_wider() -> None:
    arm, reference = {0: 1.1, 1: 1.3, 2: 1.2}, {0: 1.0, 1: 1.0, 2: 1.0}
    plain, adaptive = ratio(TOKENS, arm, reference), ratio(TOKENS, arm, reference, adaptive=True)
    assert adaptive.low is not None and plain.low is not None and adaptive.low < plain.low


def test_pairs_with_null_zero_or_inf_are_left_out_and_n_counts_the_rest() -> None:
    arm = {0: 2.0, 1: None, 2: 0.0, 3: math.inf, 4: 2.0, 5: 2.0, 7: 5.0}
    reference = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 0.0, 5: 1.0, 6: 1.0}
    assert paired_log_ratios(arm, reference) == [math.log(2.0)] * 2
    assert ratio(TOKENS, arm, reference).n == 2


def test_without_a_pair_nothing_was_shown_which_does_not_say_that_the_arms_are_not_comparable() -> None:
    nothing = [({0: None}, {0: 1.0}), ({0: 0.0}, {0: 0.0}), ({0: 1.0}, {1: 1.0}), ({}, {})]
    found = [ratio(TOKENS, arm, reference) for arm, reference in nothing]
    assert found == [Ratio(None, None, None, 0, "no difference shown")] * len(nothing)
    other = ratio(TOKENS, {0: 2.0}, {0: 1.0}, comparable=False)
    assert other == Ratio(None, None, None, 1, "not comparable")
    assert ratio(TOKENS, {0: None}, {0: 1.0}, comparable=False).verdict == "not comparable"


@pytest.mark.parametrize(
    ("metric", "low", "high", "expected"),
    [
        (TOKENS, 1.01, 1.2, "better"),
        (TOKENS, 0.8, 0.99, "worse"),
        (TOKENS, 0.99, 1.2, "no difference shown"),
        (TOKENS, 1.0, 1.2, "no difference shown"),
        (TOKENS, None, None, "no difference shown"),
        ("itl_s.p50", 0.8, 0.99, "better"),
        ("kv_waste.internal", 1.01, 1.2, "worse"),
        ("peak_memory_bytes", 0.5, 0.6, "better"),
        ("ttft_s.n", 0.5, 0.6, "no difference shown"),
        ("n_requests", 0.5, 0.6, "no difference shown"),
    ],
)
def test_verdicts(metric: str, low: float | None, high: float | None, expected: str) -> None:
    assert verdict(metric, low, high) == expected


def test_directions() -> None:
    up = ["goodput_per_s", "slot_utilization", "acceptance_rate", "top1_agreement", "mfu", "kv_utilization"]
    down = ["ttft_s.p99", "e2e_s.mean", "kv_waste.unusable", "perplexity", "cost_per_million_output_tokens"]
    assert [direction(m) for m in up] == [1] * len(up) and [direction(m) for m in down] == [-1] * len(down)
    assert direction("prefix_hit_rate_planned") == direction("ttft_s.n") == direction("output_tokens") == 0


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=25), st.booleans())
def test_swapping_the_arms_inverts_ratio_interval_and_verdict(pairs: list[tuple[float, float]], adaptive: bool) -> None:
    a, b = {i: x for i, (x, _) in enumerate(pairs)}, {i: y for i, (_, y) in enumerate(pairs)}
    there, back = ratio(TOKENS, a, b, adaptive=adaptive), ratio(TOKENS, b, a, adaptive=adaptive)
    assert there.median is not None and back.median == pytest.approx(1 / there.median, rel=1e-9)
    opposite = {"better": "worse", "worse": "better"}
    assert back.verdict == opposite.get(there.verdict, there.verdict)
    if there.low and there.high and there.low > 1e-300 and there.high < 1e300:
        assert back.low == pytest.approx(1 / there.high, rel=1e-6)
        assert back.high == pytest.approx(1 / there.low, rel=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=25), st.sampled_from([CONFIDENCE, ADAPTIVE_CONFIDENCE]))
def test_the_interval_contains_the_median(values: list[float], confidence: float) -> None:
    low, high = interval(values, confidence) or (math.nan, math.nan)
    assert low <= median(values) <= high


@given(st.floats(-3, 3), st.integers(2, 25))
def test_equal_ratios_have_an_interval_around_them(value: float, n: int) -> None:
    low, high = interval([value] * n) or (math.nan, math.nan)
    assert low <= value <= high and high - low < 1e-12


@pytest.mark.parametrize("noise", ["normal", "laplace"])
@pytest.mark.parametrize("n", [2, 3, 5, 6, 9, 15])
def test_coverage(n: int, noise: str) -> None:
    """Symmetric noise around a true log ratio: the interval holds it in about 95 % (t) or at least 95 % (order)."""
    draws = getattr(np.random.default_rng([n, len(noise)]), noise)(0.3, 1.0, (2000, n))
    bounds = np.array([interval(row) for row in draws.tolist()])
    covered = float(((bounds[:, 0] <= 0.3) & (bounds[:, 1] >= 0.3)).mean())
    assert 0.938 <= covered <= 0.985
