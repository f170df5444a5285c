"""The predicted speed-up of speculation: its formula, the acceptance that goes into it, and where it falls to 1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.speculation import (
    FIELDS,
    break_even_batch,
    conditional_acceptance,
    expected_accepted,
    predicted_speedup,
    speculation_metrics,
)


@pytest.mark.parametrize(("c", "factor"), [(0.0, 3.05), (0.02, 2.82), (0.05, 2.54), (0.1, 2.18), (0.2, 1.69)])
def test_where_rows_are_free_it_is_the_papers_factor(c: float, factor: float) -> None:
    """a = 0.75, g = 4: 3.05 tokens a step, which is a speed-up of 3.05 only if drafts cost nothing."""
    assert predicted_speedup(0.75, 4, c, 1.0) == pytest.approx(factor, abs=0.006)
    assert predicted_speedup(0.75, 4, c, 1.0) == pytest.approx((1 - 0.75**5) / (0.25 * (4 * c + 1)))


def test_rows_that_are_not_free_divide_it() -> None:
    assert predicted_speedup(0.75, 4, 0.05, 2.4) == pytest.approx((1 - 0.75**5) / (0.25 * (4 * 0.05 + 2.4)))
    assert predicted_speedup(1.0, 4, 0.0, 1.0) == 5
    assert predicted_speedup(0.0, 4, 0.1, 1.2) == pytest.approx(1 / 1.6)
    half = predicted_speedup(0.75, 4, 0.05, 1.2, share=0.5)
    assert half == pytest.approx((1 + 0.5 * expected_accepted(0.75, 4)) / (0.5 * 4 * 0.05 + 1.2))


@given(st.floats(0, 1), st.floats(0.5, 12))
def test_acceptance_is_what_the_tokens_accepted_say(a: float, g: float) -> None:
    found = conditional_acceptance(expected_accepted(a, g), g)
    assert found is not None
    assert expected_accepted(found, g) == pytest.approx(expected_accepted(a, g), abs=1e-9)
    assert g < 1 or found == pytest.approx(a, abs=1e-6)


def test_acceptance_does_not_depend_on_the_length_as_the_acceptance_rate_does() -> None:
    rng = np.random.default_rng(0)
    rates, found = [], []
    for g in (1, 2, 4, 8):
        stands = rng.random((20000, g)) < 0.6
        accepted = stands.cumprod(1).sum(1).mean()
        rates.append(accepted / g)
        found.append(conditional_acceptance(float(accepted), g))
    assert found == pytest.approx([0.6] * 4, abs=0.01)
    assert rates[0] > 1.5 * rates[2] > 2 * rates[3]


@pytest.mark.parametrize(("accepted", "g"), [(0.0, 0.0), (-1.0, 2.0), (2.5, 2.0), (math.nan, 2.0)])
def test_there_is_no_acceptance_of_what_cannot_be(accepted: float, g: float) -> None:
    assert conditional_acceptance(accepted, g) is None


def steps(*rows: dict[str, float]) -> pd.DataFrame:
    """Two sequences decode in each, unless told otherwise."""
    common: dict[str, float] = {"prefill_tokens": 0, "decode_tokens": 2, "draft_tokens": 0, "accepted_tokens": 0}
    common |= {"drafting_sequences": 0, "propose_s": 0.0}
    return pd.DataFrame([{**common, **row} for row in rows])


COSTS: list[dict[str, Any]] = [
    {"sequences": 1, "rows": 1, "forward_s": 0.019},
    {"sequences": 2, "rows": 2, "forward_s": 0.02},
    {"sequences": 2, "rows": 10, "forward_s": 0.036},
]
DRAFTING = steps(
    {"prefill_tokens": 50, "decode_tokens": 1, "draft_tokens": 4, "accepted_tokens": 4, "drafting_sequences": 1},
    {"propose_s": 0.001},
    {"propose_s": 0.003, "draft_tokens": 8, "accepted_tokens": 4, "drafting_sequences": 2},
    {"propose_s": 0.003, "draft_tokens": 4, "accepted_tokens": 0, "drafting_sequences": 1},
    {"propose_s": 0.001, "draft_tokens": 2, "accepted_tokens": 2, "drafting_sequences": 1},
)


def test_the_figures_of_a_trial_by_hand() -> None:
    """Rows 2, 10, 6, 4 take 20, 36, 28, 24 ms against 20 each; 4 of 8 sequence-steps draft 14 tokens, 6 stand."""
    found = speculation_metrics(DRAFTING, COSTS)
    assert tuple(found) == FIELDS
    assert (found["drafting_share"], found["draft_length"]) == (0.5, 3.5)
    assert found["verify_cost"] == pytest.approx(108 / 80)
    assert found["draft_cost"] == pytest.approx(8 / 80 / (0.5 * 3.5))
    a = found["conditional_acceptance"]
    assert a is not None and a * (1 - a**3.5) / (1 - a) == pytest.approx(6 / 4)
    assert found["predicted_speedup"] == pytest.approx((1 + 0.5 * 1.5) / (108 / 80 + 8 / 80))


def test_where_every_step_drafts_it_is_the_formula() -> None:
    every = steps(*[{"draft_tokens": 8, "accepted_tokens": 5, "drafting_sequences": 2, "propose_s": 0.002}] * 3)
    found = speculation_metrics(every, COSTS)
    a, c, v = (found[name] or 0.0 for name in ("conditional_acceptance", "draft_cost", "verify_cost"))
    assert v == pytest.approx(36 / 20) and c == pytest.approx(2 / 20 / 4)
    assert found["predicted_speedup"] == pytest.approx((1 - a**5) / ((1 - a) * (4 * c + v)))


@pytest.mark.parametrize("costs", [None, [], COSTS[:1]])
def test_what_was_not_timed_is_not_predicted(costs: Any) -> None:
    found = speculation_metrics(DRAFTING, costs)
    assert found["drafting_share"] == 0.5 and found["conditional_acceptance"] is not None
    assert found["verify_cost"] is found["draft_cost"] is found["predicted_speedup"] is None


@pytest.mark.parametrize("seen", [steps({}), steps({"prefill_tokens": 9, "draft_tokens": 4, "drafting_sequences": 1})])
def test_without_drafts_there_is_nothing(seen: pd.DataFrame) -> None:
    assert set(speculation_metrics(seen, COSTS).values()) == {None}


def test_the_batch_where_it_stops_paying() -> None:
    assert break_even_batch([(1, 2.0), (8, 0.5)]) == pytest.approx(math.sqrt(8))  # halfway, on both logarithms
    assert break_even_batch([(1, 1.5), (8, 1.0), (32, 0.5)]) == pytest.approx(8)
    assert break_even_batch([(1, 0.9), (8, 1.2), (32, 0.6)]) == pytest.approx(8 * 4 ** (math.log(1.2) / math.log(2)))


@pytest.mark.parametrize("speedups", [[], [(1, 2.0)], [(1, 2.0), (8, 1.1)], [(1, 0.9), (8, 0.5)]])
def test_a_batch_outside_of_those_measured_is_not_guessed(speedups: list[tuple[int, float]]) -> None:
    assert break_even_batch(speedups) is None
