"""Horizontal bars, one a row, each stacked from named parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.parts import LEGEND_ABOVE, floats

ROW_PX = 34
AROUND_PX = 118


def stacked_bars(
    looks: Mapping[str, tuple[str, str]], rows: Sequence[tuple[str, Mapping[str, float]]], axis: str, unit: str
) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """Traces, layout and height in px. ``looks``: part -> colour and pattern of its fill, in the order of stacking.

    ``rows``: a label, as `label` gives it, and the values by part, in ``unit``; a part that a row lacks is not drawn.
    """
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "x": floats([values.get(part) for _, values in rows], 3),
            "y": list(range(len(rows))),
            "marker": {
                "color": colour,
                "pattern": {
                    "shape": pattern,
                    "size": 5,
                    "solidity": 0.25,
                    "fillmode": "overlay",
                    "fgcolor": "@paper",
                },
            },
            "hovertemplate": f"{part} %{{x:.2f}} {unit}<extra></extra>",
        }
        for part, (colour, pattern) in looks.items()
        if any(part in values for _, values in rows)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {"title": {"text": f"{axis} ({unit})"}, "rangemode": "tozero"},
        "yaxis": rows_axis([name for name, _ in rows]),
        "legend": {**LEGEND_ABOVE, "traceorder": "normal"},
        "showlegend": True,
        "hovermode": "closest",
    }
    return traces, layout, AROUND_PX + ROW_PX * len(rows)


def rows_axis(names: Sequence[str]) -> dict[str, Any]:
    """A y axis with a name for each row, the first at the top."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "automargin": True,
        "ticklabelstandoff": 6,  # px, off the bars
    }
