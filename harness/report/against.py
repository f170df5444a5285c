"""An arm against another one by a quantity of their trials, as charts and their tables show it.

Such a cell or trace names its quantity, so that `compare.js` can put it against the baseline that a reader chooses, by
the same rules and from the trials' values that `harness.report.compare` gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.report.data import Arm, Report, middle
from harness.report.parts import MISSING, Cell, text_cell, times
from harness.statistics import Ratio, ratio
from harness.summary import comparable

Values = Mapping[int, float]  # by trial number


def pairable(arm: Arm, other: Arm | None) -> bool:
    """Whether the other arm is there, and its trials ran under conditions that may be compared."""
    return other is not None and comparable(arm.trials, other.trials)


def ratio_to(report: Report, arm: Arm, other: Arm | None, ours: Values, theirs: Values) -> Ratio:
    """Arm over other, paired by trial; its verdict says nothing: what is good of such a quantity is nowhere said."""
    return ratio("", ours, theirs, comparable=pairable(arm, other), adaptive=report.adaptive)


def ratio_cell(found: Ratio, quantity: str) -> Cell:
    """A ratio that the page computes anew when another baseline is chosen, by ``quantity``."""
    return Cell(times(found.median, found.low, found.high), found.median, follows=f"ratio {quantity}")


def difference_cell(ours: Values, theirs: Values, quantity: str) -> Cell:
    """The median over pairs of ours - theirs."""
    value = middle(ours[trial] - theirs[trial] for trial in ours.keys() & theirs.keys())
    text = MISSING if value is None else f"{round(value, 2) + 0.0:+,.2f}"  # no "-0.00"
    return Cell(text, value, follows=f"difference {quantity}")


def name_cell(other: Arm | None) -> Cell:
    """Whom the cells beside it compare with."""
    name = text_cell(None if other is None else other.name)
    return Cell(name.text, numeric=False, follows="name")


def following(quantity: str, arms: list[Arm]) -> dict[str, Any]:
    """The `meta` of a trace whose x is a ratio with its interval, a point an arm."""
    return {"follows": quantity, "points": [arm.index for arm in arms]}
