"""Intervals of what an arm's trials gave, as bars on its point and as text in the table under it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness.report.parts import MISSING, Cell, floats, number
from harness.statistics import interval

INTERVAL_FROM = 3  # trials, or texts; an interval of two is many times as wide as they are apart

Bounds = tuple[float | None, float | None]  # both None: there is no interval


def around(values: Sequence[float], confidence: float) -> Bounds:
    """Of the centre of the trials' values, by the rules for ratios: of their logarithms."""
    if len(values) < INTERVAL_FROM or min(values) <= 0:
        return None, None
    found = interval([math.log(value) for value in values], confidence)
    return (None, None) if found is None else (math.exp(found[0]), math.exp(found[1]))


def error_bars(medians: Sequence[float | None], bounds: Sequence[Bounds], colour: str) -> dict[str, Any]:
    """`error_x` or `error_y` of the points at these medians."""
    pairs = list(zip(medians, bounds, strict=True))
    above = (None if m is None or high is None else max(0.0, high - m) for m, (_, high) in pairs)
    below = (None if m is None or low is None else max(0.0, m - low) for m, (low, _) in pairs)
    return {
        **{"type": "data", "symmetric": False, "array": floats(above), "arrayminus": floats(below)},
        **{"color": colour, "thickness": 1.2, "width": 3},
    }


def room(medians: Sequence[float], others: Sequence[float | None]) -> float:
    """An axis' end, from 0: above the medians and their labels, and above the others unless these lie far away."""
    highest = max(medians) or 1.0  # an axis on which all is 0 has a length all the same
    furthest = max((value for value in others if value is not None and math.isfinite(value)), default=0.0)
    return round(max(1.14 * highest, min(1.05 * furthest, 1.7 * highest)), 6)


def bounds_text(bounds: Bounds, digits: int) -> str:
    low, high = bounds
    return MISSING if low is None or high is None else f"[{number(low, digits)}, {number(high, digits)}]"


def beside(cell: Cell, bounds: Bounds, text: Callable[[float | None], str]) -> Cell:
    """The cell of a figure with its interval behind it, where there is one: `17.5 [16.9, 18.1]`."""
    low, high = bounds
    return cell if low is None or high is None else replace(cell, text=f"{cell.text} [{text(low)}, {text(high)}]")
