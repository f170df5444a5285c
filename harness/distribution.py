"""Percentiles by nearest rank: what a record says of a set of values (DESIGN section 6)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 95, 99)


def nearest_rank(ordered: npt.NDArray[np.float64], percent: int) -> float:
    """The smallest value with at least ``percent`` % of all at or below it; ascending, not empty, inf allowed."""
    return float(ordered[max(0, -(-percent * len(ordered) // 100) - 1)])


def distribution(values: Iterable[float], finished: Iterable[float] | None = None) -> dict[str, float | int | None]:
    """p50, p90, p95, p99, max and n of ``values``, and the mean of ``finished``: those that come of requests which
    finished (None: all of them do). The empty set is null with n 0."""
    ordered = np.sort(np.fromiter(values, np.float64))
    averaged = ordered if finished is None else np.fromiter(finished, np.float64)
    found: dict[str, float | int | None] = {"mean": math.fsum(averaged) / len(averaged) if len(averaged) else None}
    if not len(ordered):
        return {**found, **{f"p{p}": None for p in PERCENTILES}, "max": None, "n": 0}
    return {
        **found,
        **{f"p{p}": nearest_rank(ordered, p) for p in PERCENTILES},
        "max": float(ordered[-1]),
        "n": len(ordered),
    }
