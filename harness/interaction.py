"""Do gains multiply? What several techniques give together against the product of what each gives alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.statistics import Ratio, ratio

Values = Mapping[int, float | None]  # of one arm, by trial


@dataclass(frozen=True)
class Interaction:
    """Of an arm with several factors. ``joint``: the arm against the baseline; ``deviation``: joint / product of the
    single gains, formed in each trial that has them all. 1: they multiply; less: each takes away from the others, as
    where two remove the same bottleneck.

    Of a ratio's verdict only whether there is any difference says something here.
    """

    arm: str
    factors: tuple[str, ...]
    product: float | None  # the medians of the single gains, multiplied
    joint: Ratio
    deviation: Ratio


def factors_of(arm: str, baseline: str) -> tuple[str, ...]:
    """An arm of a factorial study is named by what it changes: ``paged+int8``; the baseline changes nothing."""
    return () if arm == baseline else tuple(arm.split("+"))


def interactions(
    metric: str, values: Mapping[str, Values], baseline: str, *, adaptive: bool = False
) -> list[Interaction]:
    """Every arm of two or more factors whose single ones are arms as well, in the order given.

    values: by arm the metric in each trial, more of it being better or worse as `statistics.direction` has it. A trial
    in which one of the arms has no positive value is left out. adaptive: the study stops by its own intervals.
    """
    alone = {factors_of(arm, baseline)[0]: arm for arm in values if len(factors_of(arm, baseline)) == 1}
    found = []
    for arm in values:
        factors = factors_of(arm, baseline)
        if len(factors) < 2 or not all(factor in alone for factor in factors):
            continue
        singles = [values[alone[factor]] for factor in factors]
        gains = [ratio(metric, single, values[baseline]).median for single in singles]
        product = None if None in gains else math.prod(gain for gain in gains if gain is not None)
        # joint / product = (arm / baseline) / prod(single / baseline) = arm x baseline^(k-1) / prod(single)
        above = _product([values[arm], *[values[baseline]] * (len(factors) - 1)])
        joint = ratio(metric, values[arm], values[baseline], adaptive=adaptive)
        deviation = ratio(metric, above, _product(singles), adaptive=adaptive)
        found.append(Interaction(arm, factors, product, joint, deviation))
    return found


def _product(columns: list[Values]) -> dict[int, float | None]:
    """By trial; None where one of them has nothing, or what no ratio can be formed of."""
    product: dict[int, float | None] = {}
    for trial in set.intersection(*(set(column) for column in columns)):
        parts = [value for column in columns if (value := column[trial]) is not None and 0 < value < math.inf]
        product[trial] = math.prod(parts) if len(parts) == len(columns) else None
    return product
