"""Two marks a row: what is expected of a ratio, and what was seen, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.report.bars import AROUND_PX, ROW_PX, rows_axis
from harness.report.intervals import error_bars
from harness.report.parts import LEGEND_ABOVE, floats
from harness.statistics import Ratio

LOOKS = (("@phase4", "diamond-open"), ("@used", "circle"))


def expected_and_seen(
    names: tuple[str, str], rows: Sequence[str], expected: Sequence[float | None], seen: Sequence[Ratio], axis: str
) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """Traces, layout and height in px; a line stands at 1. names: of both kinds of mark; rows: as `label` has them."""
    values = (expected, [ratio.median for ratio in seen])
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": floats(gains, 4),
            "y": list(range(len(rows))),
            "marker": {"color": colour, "symbol": symbol, "size": 11, "line": {"width": 2, "color": colour}},
            "hovertemplate": f"{name} %{{x:.2f}}x<extra></extra>",
        }
        for name, (colour, symbol), gains in zip(names, LOOKS, values, strict=True)
    ]
    traces[1]["error_x"] = error_bars(values[1], [(ratio.low, ratio.high) for ratio in seen], LOOKS[1][0])
    layout = {
        "xaxis": {"title": {"text": axis}},
        "yaxis": rows_axis(rows),
        "shapes": [{"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": "@muted"}}],
        "legend": LEGEND_ABOVE,
        "showlegend": True,
        "hovermode": "closest",
    }
    return traces, layout, AROUND_PX + ROW_PX * len(rows)
