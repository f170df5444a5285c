"""When an adaptive study goes on, by hand-made trials."""

from __future__ import annotations

import math

import pytest

from harness.adaptive import MIN_TRIALS, needs_more
from harness.statistics import ratio

Trials = dict[int, float | None]


def trials(*logs: float) -> Trials:
    return {t: 100 * math.exp(x) for t, x in enumerate(logs)}


def more(values: dict[str, Trials], half_width: float = 0.03, blocks: int = 5, **versus: str | None) -> bool:
    return needs_more(values, "base", versus, half_width, blocks=blocks, max_trials=20)


FLAT = trials(*[0.0] * 5)
QUIET = trials(0.1, 0.11, 0.1, 0.11, 0.1)
LOUD = trials(0.1, 0.3, 0.0, 0.2, 0.1)


def test_goes_on_until_the_interval_is_narrow_enough() -> None:
    assert more({"base": FLAT, "arm": LOUD})
    assert not more({"base": FLAT, "arm": QUIET})


def test_half_the_reported_interval_decides() -> None:
    found = ratio("output_tokens_per_s", LOUD, FLAT, adaptive=True)
    assert found.low is not None and found.high is not None
    half = (math.log(found.high) - math.log(found.low)) / 2
    assert more({"base": FLAT, "arm": LOUD}, half_width=half * 0.999)
    assert not more({"base": FLAT, "arm": LOUD}, half_width=half * 1.001)


def test_every_arm_must_be_narrow() -> None:
    assert more({"base": FLAT, "quiet": QUIET, "loud": LOUD})


def test_versus_must_be_narrow_too() -> None:
    # Each stays near the baseline, the two move against each other.
    up = trials(0.02, -0.02, 0.02, -0.02, 0.02)
    down = trials(-0.02, 0.02, -0.02, 0.02, -0.02)
    values = {"base": FLAT, "a": up, "b": down}
    assert not more(values, half_width=0.05)
    assert more(values, half_width=0.05, b="a")
    assert not more(values, half_width=0.05, a="base", b="base")


def test_never_under_five_trials_and_never_beyond_the_most() -> None:
    same = {"base": FLAT, "arm": FLAT}
    assert [more(same, blocks=n) for n in (0, MIN_TRIALS - 1, MIN_TRIALS)] == [True, True, False]
    assert not more({"base": FLAT, "arm": LOUD}, blocks=20)
    assert not needs_more(same, "base", {}, 0.03, blocks=3, max_trials=3)


def test_five_pairs_are_needed_not_five_blocks() -> None:
    missing: Trials = {**QUIET, 2: None}
    assert more({"base": FLAT, "arm": missing})
    assert not more({"base": {**FLAT, 5: 100.0}, "arm": {**missing, 5: 110.0}}, blocks=6)


@pytest.mark.parametrize("failing", [{}, dict.fromkeys(range(5)), {7: 100.0}])
def test_an_arm_without_any_pair_is_not_waited_for(failing: Trials) -> None:
    assert not more({"base": FLAT, "arm": failing, "quiet": QUIET})
    assert not more({"base": failing, "arm": QUIET})
    assert more({"base": FLAT, "arm": failing, "loud": LOUD})


def test_an_arm_that_is_left_out_is_waited_for_in_neither_role() -> None:
    assert not more({"base": FLAT, "quiet": QUIET}, quiet="loud")
    assert not more({"quiet": QUIET, "loud": LOUD})


def test_a_study_of_one_arm_has_nothing_to_narrow() -> None:
    assert not more({"base": FLAT})
