"""Throughput of the machine against the speed that one user sees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from harness.report.data import Arm, Report
from harness.report.parts import Chart, Table, fixed, floats, label, number_cell, text_cell

BOTH = "%{y:.1f} tok/s, %{x:.1f} tok/s per user<extra></extra>"
LABELLED_ARMS = 12  # more labels than that cover one another


def chart(report: Report) -> Chart:
    title = "Throughput against latency: what the machine yields and what one user sees"
    points = {arm.name: point for arm in report.arms if (point := _point(arm.metrics)) is not None}
    if not points:
        empty = "No arm has both a throughput and an inter-token latency."
        return Chart("tradeoff", title, "", Table((), ()), empty=empty)
    seen = [arm for arm in report.arms if arm.name in points]
    labelled = len(seen) <= LABELLED_ARMS
    traces: list[dict[str, Any]] = []
    for arm in seen:
        shared = {"type": "scatter", "legendgroup": str(arm.index), "name": label(arm.name)}
        trials = [p for trial in arm.ok if (p := _point(_flat(trial.run["metrics"]))) is not None]
        traces += [
            {
                **shared,
                "mode": "markers",
                "x": floats(x for x, _ in trials),
                "y": floats(y for _, y in trials),
                "marker": {"symbol": f"{arm.marker}-open", "size": 7, "color": arm.colour},
                "opacity": 0.55,
                "showlegend": False,
                "hovertemplate": f"%{{fullData.name}}, one trial<br>{BOTH}",
            },
            {
                **shared,
                "mode": "markers+text" if labelled else "markers",
                "x": floats([points[arm.name][0]]),
                "y": floats([points[arm.name][1]]),
                "text": [label(arm.name, 28) + (" (emulated)" if arm.emulated else "")],
                "textposition": "top center",
                "cliponaxis": False,
                "marker": {
                    "symbol": f"{arm.marker}-open" if arm.emulated else arm.marker,
                    "size": 12,
                    "color": arm.colour,
                },
                "hovertemplate": f"%{{fullData.name}}, median<br>{BOTH}",
            },
        ]
    layout = {
        "xaxis": {"title": {"text": "output speed per user, 1 / median ITL (tok/s)"}, "range": [0, _room(points, 0)]},
        "yaxis": {"title": {"text": "output of the machine (tok/s)"}, "range": [0, _room(points, 1)]},
        "showlegend": not labelled,
        "annotations": [arrow for arm in seen if (arrow := _step(arm, points)) is not None],
        "hovermode": "closest",
    }
    left_out = [arm.name for arm in report.arms if arm.name not in points]
    note = "Filled: median of the trials; open: each trial. Arrows lead to an arm from the one it builds on."
    if left_out:
        note += f" Without both figures, so not drawn: {', '.join(left_out)}."
    if any(arm.emulated for arm in seen):
        note += f" Speed emulated, not to be compared: {', '.join(arm.name for arm in seen if arm.emulated)}."
    return Chart("tradeoff", title, note, _table(seen, points), traces, layout, 400)


def _point(metrics: Mapping[str, float | None]) -> tuple[float, float] | None:
    """(tok/s per user, tok/s); None where either does not exist."""
    itl, rate = metrics.get("itl_s.p50"), metrics.get("output_tokens_per_s")
    if itl is None or rate is None or not 0 < itl < math.inf or not math.isfinite(rate):
        return None
    return 1 / itl, rate


def _flat(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    itl = metrics.get("itl_s") or {}
    return {"itl_s.p50": itl.get("p50"), "output_tokens_per_s": metrics.get("output_tokens_per_s")}


def _step(arm: Arm, points: Mapping[str, tuple[float, float]]) -> dict[str, Any] | None:
    below = arm.entry["versus"]
    if below not in points or below == arm.name or arm.emulated:
        return None
    (x, y), (from_x, from_y) = points[arm.name], points[below]
    return {
        **{"x": x, "y": y, "ax": from_x, "ay": from_y, "xref": "x", "yref": "y", "axref": "x", "ayref": "y"},
        **{"text": "", "showarrow": True, "arrowhead": 2, "arrowsize": 0.9, "arrowwidth": 1.1, "arrowcolor": "@muted"},
        **{"standoff": 9, "startstandoff": 9},
    }


def _room(points: Mapping[str, tuple[float, float]], coordinate: int) -> float:
    """An axis end with room for a label above the highest point."""
    highest: float = max(point[coordinate] for point in points.values())
    return round(1.14 * highest, 6)


def _table(arms: list[Arm], points: Mapping[str, tuple[float, float]]) -> Table:
    rows = []
    for arm in arms:
        rows.append(
            [
                text_cell(arm.name),
                arm.cell("output_tokens_per_s", fixed(1)),
                arm.cell("itl_s.p50", fixed(1, 1e3)),
                number_cell(points[arm.name][0], 1),
                number_cell(len(arm.ok), 0),
            ]
        )
    return Table(("arm", "output tok/s", "ITL p50 (ms)", "tok/s per user", "trials (n)"), rows)
