"""Where a figure's names stand: above it while they are few, else beside it, and the figure across the page."""

from __future__ import annotations

from typing import Any, NamedTuple

from harness.report.parts import LEGEND_ABOVE

FEW = 8  # fit above half a page in some three rows
ENTRY_PX, AROUND_PX = 20, 70
MOST_ENTRIES = 60  # of more the legend scrolls


class Legend(NamedTuple):
    """``layout``: what the figure's gets of it; ``height`` in px and ``wide``: the chart's."""

    layout: dict[str, Any]
    height: int
    wide: bool


def legend(entries: int, height: int) -> Legend:
    """``height``: of the figure in px, had it no more than a few entries."""
    if entries <= FEW:
        return Legend({"showlegend": True, "legend": LEGEND_ABOVE}, height, False)
    tall = AROUND_PX + ENTRY_PX * min(entries, MOST_ENTRIES)
    return Legend({"showlegend": True, "legend": {"tracegroupgap": 0}}, max(height, tall), True)
