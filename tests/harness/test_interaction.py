"""Joint gains against products of single ones, by hand."""

from __future__ import annotations

import math

import pytest

from harness.interaction import factors_of, interactions

METRIC = "output_tokens_per_s"
NOISE = (1.0, 1.3, 0.8)  # of a whole trial: it must cancel


def study(**rates: float) -> dict[str, dict[int, float | None]]:
    return {arm.replace("_", "+"): {t: rate * noise for t, noise in enumerate(NOISE)} for arm, rate in rates.items()}


def test_gains_that_multiply() -> None:
    (found,) = interactions(METRIC, study(none=10.0, a=15.0, b=20.0, a_b=30.0), "none")
    assert (found.arm, found.factors) == ("a+b", ("a", "b"))
    assert found.product == pytest.approx(3.0) and found.joint.median == pytest.approx(3.0)
    assert found.deviation.median == pytest.approx(1.0) and found.deviation.n == 3
    assert found.deviation.low is not None and found.deviation.high is not None
    assert found.deviation.low <= 1 + 1e-12 and found.deviation.high >= 1 - 1e-12


def test_gains_that_take_away_from_each_other() -> None:
    """Of three that double alone and together only triple, with a noise in one arm by which the interval is known."""
    values = study(none=10.0, a=20.0, b=20.0, c=20.0, a_b_c=30.0)
    values["a+b+c"] = {t: 30.0 * NOISE[t] * wobble for t, wobble in enumerate((1.0, 1.1, 1 / 1.1))}
    (found,) = interactions(METRIC, values, "none")
    assert found.product == pytest.approx(8.0) and found.joint.median == pytest.approx(3.0)
    assert found.deviation.median == pytest.approx(3 / 8)
    half = 4.302652729749462 * math.log(1.1) / math.sqrt(3)  # t(.975, 2) s / sqrt(n), s = log 1.1
    assert found.deviation.low == pytest.approx(3 / 8 * math.exp(-half))
    assert found.deviation.high == pytest.approx(3 / 8 * math.exp(half))
    assert found.deviation.verdict == "worse"


def test_every_pair_and_more_of_a_factorial() -> None:
    names = ("a", "b", "c", "a_b", "a_c", "b_c", "a_b_c")
    found = interactions(METRIC, study(none=1.0, **dict.fromkeys(names, 2.0)), "none")
    assert [each.arm for each in found] == ["a+b", "a+c", "b+c", "a+b+c"]


def test_a_trial_that_lacks_an_arm_is_left_out_and_an_arm_without_its_singles_too() -> None:
    values = study(none=10.0, a=15.0, b=20.0, a_b=30.0, a_d=99.0)
    values["b"][1] = None
    values["a"][2] = 0.0
    (found,) = interactions(METRIC, values, "none")
    assert found.deviation.n == 1 and found.deviation.low is None and found.joint.n == 3
    values["a"] = dict.fromkeys(range(3))
    (found,) = interactions(METRIC, values, "none")
    assert found.product is None and found.deviation.median is None


def test_the_baseline_has_no_factor() -> None:
    assert factors_of("static", "static") == () and factors_of("paged+int8", "static") == ("paged", "int8")
