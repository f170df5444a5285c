"""Adaptive draft length: the optimum of its model, close to the best fixed length on any machine and any acceptance."""

from __future__ import annotations

from itertools import accumulate, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impls.decoding.draft_length import (
    PROBE_SHARE,
    AcceptanceEstimate,
    AdaptiveDraftLength,
    CostCurve,
    best_lengths,
)
from impls.seams import DecodeCosts

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 144)


def costs(flat_rows: float, draft_s: float, most: int = 16) -> DecodeCosts:
    """A step of up to ``flat_rows`` rows takes 1 s, one of more takes time in proportion."""
    return DecodeCosts({rows: max(1.0, rows / flat_rows) for rows in ROWS}, dict.fromkeys((1, most), draft_s))


def fixed_rate(a: float, k: int, batch: int, known: DecodeCosts) -> float:
    """Expected tokens a second with k drafts each."""
    step_s = CostCurve(known.step_s)(batch * (k + 1)) + k * known.draft_s[1]
    return batch * sum(a**j for j in range(k + 1)) / step_s


def simulate(
    policy: AdaptiveDraftLength, known: DecodeCosts, acceptance: list[float], most: int, steps: int, seed: int = 0
) -> tuple[float, list[dict[str, int]]]:
    """(tokens a second, the lengths of each step) of sequences whose drafts stand with these probabilities."""
    rng, curve = np.random.default_rng(seed), CostCurve(known.step_s)
    names = [str(i) for i in range(len(acceptance))]
    tokens, seconds, chosen = 0, 0.0, []
    for _ in range(steps):
        lengths = dict(policy.choose(dict.fromkeys(names, most)))
        chosen.append(lengths)
        rows = len(names) + sum(lengths.values())
        seconds += curve(rows) + max(lengths.values()) * known.draft_s[1]
        for name, a in zip(names, acceptance, strict=True):
            fell = np.flatnonzero(rng.random(lengths[name]) >= a)
            accepted = int(fell[0]) if len(fell) else lengths[name]
            policy.observe(name, lengths[name], accepted)
            tokens += accepted + 1
    return tokens / seconds, chosen


def calibrated(known: DecodeCosts) -> AdaptiveDraftLength:
    policy = AdaptiveDraftLength()
    policy.calibrate(known)
    return policy


@settings(max_examples=60)
@given(
    acceptance=st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.8, 0.95, 1.0]), min_size=1, max_size=3),
    most=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    added=st.lists(st.floats(0, 1), min_size=9, max_size=9),
    draft_s=st.floats(0, 0.5),
)
def test_no_other_combination_of_lengths_is_expected_to_be_faster(
    acceptance: list[float], most: list[int], added: list[float], draft_s: float
) -> None:
    limits = most[: len(acceptance)]
    step_s = list(accumulate([1.0, *added]))  # rows of any cost, never falling

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = sum(sum(a**j for j in range(k + 1)) for a, k in zip(acceptance, lengths, strict=True))
        return tokens / (step_s[sum(lengths)] + draft_s * max(lengths))

    best = max(map(rate, product(*(range(limit + 1) for limit in limits))))
    found = best_lengths(acceptance, limits, step_s, draft_s)
    assert all(0 <= k <= limit for k, limit in zip(found, limits, strict=True))
    assert rate(tuple(found)) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("flat_rows", [1.0, 3.0, 9.0, 200.0])
@pytest.mark.parametrize("draft_s", [0.0, 0.05, 0.4])
def test_hardly_slower_than_the_best_fixed_length(batch: int, flat_rows: float, draft_s: float) -> None:
    most, steps = 4, 1200 // batch
    known = costs(flat_rows, draft_s)
    for seed, a in enumerate((0.1, 0.4, 0.7, 0.95)):
        best = max(fixed_rate(a, k, batch, known) for k in range(most + 1))
        rate, _ = simulate(calibrated(known), known, [a] * batch, most, steps, seed)
        assert rate > 0.95 * best, (a, rate / best)


def test_it_gains_where_one_length_for_all_cannot() -> None:
    """Sequences that draft well beside sequences that do not, on a machine where a row is a third of a step."""
    known = costs(6.0, 0.02)
    acceptance = [0.95, 0.95, 0.05, 0.05]
    rate, chosen = simulate(calibrated(known), known, acceptance, 4, 600)
    curve = CostCurve(known.step_s)

    def same(k: int) -> float:
        tokens = sum(sum(a**j for j in range(k + 1)) for a in acceptance)
        return tokens / (curve(4 * (k + 1)) + 0.02 * k)

    assert rate > 1.1 * max(map(same, range(5)))
    late = chosen[100:]
    assert sum(c["0"] for c in late) > 10 * sum(c["2"] for c in late)


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_nothing_is_drafted_where_rows_cost_in_proportion(batch: int) -> None:
    known = costs(1.0, 0.01)
    _, chosen = simulate(calibrated(known), known, [0.9] * batch, 4, 50)
    assert not any(any(lengths.values()) for lengths in chosen)


def test_probing_takes_its_share_of_the_time_and_no_more() -> None:
    """Drafts that never stand, where they would pay if they did: what is lost is what probing may take."""
    known = costs(2.0, 0.3)
    policy = calibrated(known)
    simulate(policy, known, [0.0], 4, 100)
    rate, chosen = simulate(policy, known, [0.0], 4, 2000)
    assert {lengths["0"] for lengths in chosen} == {0, 1}
    assert 1 - 1.5 * PROBE_SHARE < rate < 1 - 0.5 * PROBE_SHARE


def test_each_idle_sequence_is_probed_in_its_turn() -> None:
    known = costs(6.0, 0.3)
    policy = calibrated(known)
    simulate(policy, known, [0.0] * 4, 4, 200)
    _, chosen = simulate(policy, known, [0.0] * 4, 4, 2000)
    probed = [next(name for name, k in lengths.items() if k) for lengths in chosen if any(lengths.values())]
    assert len(probed) > 40 and all(set(probed[i : i + 4]) == set("0123") for i in range(len(probed) - 3))


def test_it_drafts_again_when_drafts_begin_to_stand() -> None:
    known = costs(9.0, 0.05)
    policy = calibrated(known)
    _, before = simulate(policy, known, [0.0], 4, 300)
    assert sum(lengths["0"] for lengths in before[-100:]) < 50
    _, after = simulate(policy, known, [0.95], 4, 300)
    assert sum(lengths["0"] for lengths in after[-100:]) > 350


def test_a_draft_behind_a_rejected_one_says_nothing() -> None:
    estimate = AcceptanceEstimate()
    for _ in range(200):
        estimate.observe("a", 8, 1)  # one stood, the next fell, six were never reached
        estimate.observe("b", 2, 1)
    assert estimate.of("a") == pytest.approx(0.5, abs=0.02)
    assert estimate.of("a") == pytest.approx(estimate.of("b"))


def test_a_new_sequence_starts_with_what_the_others_have_shown() -> None:
    estimate = AcceptanceEstimate()
    for _ in range(300):
        estimate.observe("a", 4, 4)
    assert estimate.of("b") == estimate.of("c") > 0.95
    estimate.observe("b", 4, 0)
    assert estimate.of("b") < estimate.of("c")
    estimate.forget("b")
    assert estimate.of("b") == estimate.of("c")


def test_costs_between_and_beyond_what_was_measured() -> None:
    curve = CostCurve({1: 1.0, 5: 1.4, 9: 1.2, 13: 2.2})  # nine rows are not faster than five
    assert [curve(count) for count in (1, 3, 9, 11, 15)] == pytest.approx([1.0, 1.2, 1.4, 1.8, 2.6])
    assert [CostCurve({4: 2.0})(count) for count in (1, 40)] == [2.0, 2.0]
    assert CostCurve({4: 2.0, 8: 3.0})(1) == 2.0


def test_without_costs_every_draft_is_worth_it_and_a_calibration_begins_afresh() -> None:
    policy = AdaptiveDraftLength()
    for _ in range(50):
        assert policy.choose({"a": 4, "b": 0}) == {"a": 4, "b": 0}
        policy.observe("a", 4, 0)
    policy.calibrate(costs(100.0, 0.01))
    assert policy.choose({"a": 4})["a"] == 4, "what the warm-up's drafts showed is no part of it"
    with pytest.raises(ValueError, match="cost"):
        policy.calibrate(DecodeCosts({}, {1: 0.1}))


def test_the_same_past_gives_the_same_lengths() -> None:
    known = costs(5.0, 0.1)
    one, two = (simulate(calibrated(known), known, [0.3, 0.8], 4, 200, seed=5) for _ in range(2))
    assert one == two and len({tuple(lengths.values()) for lengths in one[1]}) > 2
