"""Texts that records, tables and messages have in common. It imports next to nothing: a report has no need of Hydra."""

from __future__ import annotations

import math


def one_line(text: str) -> str:
    return " ".join(text.split())


def number(value: float | None, digits: int = 2, scale: float = 1.0, missing: str = "-") -> str:
    """``missing`` for None and NaN."""
    if value is None or math.isnan(value):
        return missing
    return ("inf" if value > 0 else "-inf") if math.isinf(value) else f"{value * scale:,.{digits}f}"


def percent(value: float | None, digits: int = 1, missing: str = "-") -> str:
    """Of a share: 0.5 is `50.0 %`."""
    shown = number(value, digits, 100, missing)
    return shown if shown in (missing, "inf", "-inf") else f"{shown} %"


def times(median: float | None, low: float | None, high: float | None, missing: str = "-") -> str:
    """`1.84x [1.71, 1.98]`; one pair has no interval."""
    if median is None:
        return missing
    bounds = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{median:.2f}x{bounds}"
