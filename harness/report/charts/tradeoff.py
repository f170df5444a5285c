"""Throughput of the machine against the speed that one user sees, and the frontier of what the arms reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from harness.report.data import Arm, Report
from harness.report.intervals import INTERVAL_FROM, Bounds, around, bounds_text, error_bars, room
from harness.report.legends import legend
from harness.report.parts import Cell, Chart, Table, fixed, floats, label, number_cell, percent, text_cell
from harness.report.placing import Named, placed
from harness.summary import incomparable

Point = tuple[float, float]  # tok/s per user, tok/s

BOTH = "%{y:.1f} tok/s, %{x:.1f} tok/s per user<extra></extra>"
LABELLED_ARMS = 12  # more labels than that cover one another
HEIGHT_PX, PLOT_PX = 400, (570.0, 330.0)  # its points' part of half a page


def chart(report: Report) -> Chart:
    title = "Throughput against latency: what the machine yields and what one user sees"
    points = {arm.name: point for arm in report.arms if (point := _point(arm.metrics)) is not None}
    if not points:
        empty = "No arm has both a throughput and an inter-token latency."
        return Chart("tradeoff", title, "", Table((), ()), empty=empty)
    seen = [arm for arm in report.arms if arm.name in points]
    trials = {arm.name: [p for t in arm.ok if (p := _point(_flat(t.run["metrics"]))) is not None] for arm in seen}
    bounds = {
        name: tuple(around([point[i] for point in found], report.confidence) for i in range(2))
        for name, found in trials.items()
    }
    groups = comparable_groups(seen)
    ends = _ends([points[arm.name] for arm in seen], bounds.values(), [p for found in trials.values() for p in found])
    labelled = len(seen) <= LABELLED_ARMS
    names, height, wide = ({"showlegend": False}, HEIGHT_PX, False) if labelled else legend(len(seen), HEIGHT_PX)
    named = [Named(_shown(arm), *points[arm.name], *bounds[arm.name]) for arm in seen]
    places = placed(named, ends, PLOT_PX) if labelled else []
    traces = [_frontier(group, points) for group in groups]
    for arm, place in zip_longest(seen, places):
        traces += _arm(arm, trials[arm.name], points[arm.name], bounds[arm.name], place)
    layout = {
        **names,
        "xaxis": {"title": {"text": "output speed per user, 1 / median ITL (tok/s)"}, "range": [0, ends[0]]},
        "yaxis": {"title": {"text": "output of the machine (tok/s)"}, "range": [0, ends[1]]},
        "annotations": [arrow for arm in seen if (arrow := _step(arm, points)) is not None],
        "hovermode": "closest",
    }
    note = (
        f"Filled: median of the trials, with {percent(report.confidence, 0)} intervals where there are at least "
        f"{INTERVAL_FROM}; open: each trial. What a trial does to all arms alike is in these intervals, and not in "
        "those of the ratios above. Arrows lead to an arm from the one it builds on."
    )
    if groups:
        note += (
            " Dotted: the frontier. No arm that is shown lies beyond it, with more output at no less speed per user; "
            "it goes by the medians, so two arms whose intervals overlap may change places. Loads may differ, machine, "
            "model and lengths may not."
        )
    left_out = [arm.name for arm in report.arms if arm.name not in points]
    if left_out:
        note += f" Without both figures, so not drawn: {', '.join(left_out)}."
    if any(arm.emulated for arm in seen):
        note += f" Speed emulated, not to be compared: {', '.join(arm.name for arm in seen if arm.emulated)}."
    return Chart("tradeoff", title, note, _table(seen, points, bounds), traces, layout, height, wide=wide)


# --- the frontier -----------------------------------------------------------------------------------------------------


def comparable_groups(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Of each machine, model and kind of traffic the arms that share a frontier, if they are two or more.

    They may differ in their load: arms of other arrivals are other points at which an engine can be run. One whose
    speed is emulated is comparable with none.
    """
    groups: list[list[Arm]] = []
    for arm in arms:
        ours = _without_load(arm)
        group = next((group for group in groups if not incomparable(ours, _without_load(group[0]))), None)
        if group is None:
            groups.append([arm])
        else:
            group.append(arm)
    return [group for group in groups if len(group) > 1]


def _without_load(arm: Arm) -> dict[str, Any]:
    """run.json of its first ok trial, as if its requests came in no particular way."""
    run = arm.ok[0].run
    workload = run["config"].get("workload")
    if isinstance(workload, Mapping):
        workload = {key: value for key, value in workload.items() if key not in ("arrivals", "num_requests")}
    return {**run, "config": {**run["config"], "workload": workload}, "seed": None}


def _frontier(group: Sequence[Arm], points: Mapping[str, Point]) -> dict[str, Any]:
    """All points of a group in the order of x: which of them are its edge depends on the arms that are shown, and is
    found in `report.js`."""
    ordered = sorted(group, key=lambda arm: points[arm.name])
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "frontier",
        "x": floats(points[arm.name][0] for arm in ordered),
        "y": floats(points[arm.name][1] for arm in ordered),
        "line": {"color": "@muted", "width": 1.4, "dash": "dot", "shape": "vh"},
        "showlegend": False,
        "hoverinfo": "skip",
        "meta": {"frontier": True, "points": [arm.index for arm in ordered]},
    }


# --- the points -------------------------------------------------------------------------------------------------------


def _arm(
    arm: Arm, trials: Sequence[Point], point: Point, bounds: Sequence[Bounds], place: str | None
) -> list[dict[str, Any]]:
    shared = {"type": "scatter", "legendgroup": str(arm.index), "name": label(arm.name)}
    return [
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
            "mode": "markers+text" if place else "markers",
            "x": floats([point[0]]),
            "y": floats([point[1]]),
            "error_x": error_bars([point[0]], [bounds[0]], arm.colour),
            "error_y": error_bars([point[1]], [bounds[1]], arm.colour),
            "text": [_shown(arm)],
            **({"textposition": place} if place else {}),
            "cliponaxis": False,
            "marker": {
                "symbol": f"{arm.marker}-open" if arm.emulated else arm.marker,
                "size": 12,
                "color": arm.colour,
            },
            "hovertemplate": f"%{{fullData.name}}, median<br>{BOTH}",
        },
    ]


def _point(metrics: Mapping[str, float | None]) -> Point | None:
    """None where either figure does not exist."""
    itl, rate = metrics.get("itl_s.p50"), metrics.get("output_tokens_per_s")
    if itl is None or rate is None or not 0 < itl < math.inf or not math.isfinite(rate):
        return None
    return 1 / itl, rate


def _flat(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    itl = metrics.get("itl_s") or {}
    return {"itl_s.p50": itl.get("p50"), "output_tokens_per_s": metrics.get("output_tokens_per_s")}


def _step(arm: Arm, points: Mapping[str, Point]) -> dict[str, Any] | None:
    below = arm.entry["versus"]
    if below not in points or below == arm.name or arm.emulated:
        return None
    (x, y), (from_x, from_y) = points[arm.name], points[below]
    return {
        **{"x": x, "y": y, "ax": from_x, "ay": from_y, "xref": "x", "yref": "y", "axref": "x", "ayref": "y"},
        **{"text": "", "showarrow": True, "arrowhead": 2, "arrowsize": 0.9, "arrowwidth": 1.1, "arrowcolor": "@muted"},
        **{"standoff": 9, "startstandoff": 9},
    }


def _ends(medians: Sequence[Point], bounds: Iterable[Sequence[Bounds]], trials: Sequence[Point]) -> tuple[float, float]:
    """Of both axes, which begin at 0."""
    highs = [[high for _, high in each] for each in bounds]
    x, y = (room([p[i] for p in medians], [*(each[i] for each in highs), *(p[i] for p in trials)]) for i in range(2))
    return x, y


def _shown(arm: Arm) -> str:
    return label(arm.name, 28) + (" (emulated)" if arm.emulated else "")


def _table(arms: Sequence[Arm], points: Mapping[str, Point], bounds: Mapping[str, Sequence[Bounds]]) -> Table:
    rows = []
    for arm in arms:
        rows.append(
            [
                text_cell(arm.name),
                arm.cell("output_tokens_per_s", fixed(1)),
                Cell(bounds_text(bounds[arm.name][1], 1)),
                arm.cell("itl_s.p50", fixed(1, 1e3)),
                number_cell(points[arm.name][0], 1),
                Cell(bounds_text(bounds[arm.name][0], 1)),
                number_cell(len(arm.ok), 0),
            ]
        )
    columns = ("arm", "output tok/s", "interval (tok/s)", "ITL p50 (ms)", "tok/s per user", "interval (tok/s per user)")
    return Table((*columns, "trials (n)"), rows)
