"""Keys and values on their way to host memory and back, and whose turn it was: preemptions over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.records import TrialRecord
from harness.report.data import Arm, Report
from harness.report.figures import Floats, step_columns
from harness.report.panels import axis_key, axis_name, panel_arms, panel_title, stack, time_range, which_trials
from harness.report.parts import LEGEND_ABOVE, Cell, Chart, Table, byte_size, floats, number_cell, text_cell
from harness.report.sampling import extremes

PANEL_PX = 130
POINTS = 400
COLUMNS = ("start_s", "swapped_out_bytes", "swapped_in_bytes", "preempted", "swap_s")
# Column -> meaning and line.
DIRECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "swapped_out_bytes": ("swapped out", {"color": "@phase1", "dash": "solid"}),
    "swapped_in_bytes": ("swapped in", {"color": "@phase3", "dash": "dash"}),
}


def has_swapped(trial: TrialRecord) -> bool:
    return bool(np.nansum(step_columns(trial, ("swapped_out_bytes",))["swapped_out_bytes"]) > 0)  # null: not recorded


def swaps(report: Report) -> bool:
    """Did any arm copy a preempted sequence to host memory?"""
    return any(arm.shown is not None and has_swapped(arm.shown) for arm in report.arms)


def chart(report: Report) -> Chart:
    """Of the arms that swapped."""
    seen, total = panel_arms(report, has_swapped)
    title = "Swapping: bytes copied to host memory and back"
    if not seen:
        return Chart("swaps", title, "", Table((), ()), empty="No arm swapped.")
    found = [{name: np.nan_to_num(of) for name, of in step_columns(trial, COLUMNS).items()} for _, trial in seen]
    counts = [f"{int(steps['preempted'].sum()):,} preemptions" for steps in found]
    titles = [panel_title(arm, count) for (arm, _), count in zip(seen, counts, strict=True)]
    layout, height = stack([PANEL_PX] * len(seen), titles, time_range(seen))
    layout |= {"showlegend": True, "legend": {**LEGEND_ABOVE, "y": 1 + 14 / height}, "hovermode": "closest"}
    layout["margin"] = {**layout["margin"], "t": 34}
    traces: list[dict[str, Any]] = []
    for index, steps in enumerate(found):
        layout[axis_key(index)] |= {"rangemode": "tozero", "nticks": 4, "title": {"text": "MB so far"}}
        traces += _lines(steps, index, report.points(POINTS))
    note = (
        f"{which_trials(seen, total)} Sums since the start: what preempted sequences had computed was copied out, and "
        "what was copied back when they went on. Crosses: steps in which sequences were preempted. What is out and "
        "not back is held in host memory, or belongs to requests that ended there."
    )
    return Chart("swaps", title, note, _table(seen, found), traces, layout, height + 30)


def _lines(steps: dict[str, Floats], index: int, limit: int) -> list[dict[str, Any]]:
    """The sums of both directions, and a cross on the first where a sequence was preempted; one panel's."""
    sums = {name: steps[name].cumsum() / 1e6 for name in DIRECTIONS}
    kept = extremes(list(sums.values()), limit)
    shared = {"type": "scatter", "yaxis": axis_name(index), "showlegend": index == 0}
    traces: list[dict[str, Any]] = [
        {
            **shared,
            "mode": "lines",
            "name": meaning,
            "legendgroup": meaning,
            "x": floats(steps["start_s"][kept], 4),
            "y": floats(sums[name][kept], 4),
            "line": {"shape": "hv", "width": 2, **line},
            "hovertemplate": f"{meaning} %{{y:.2f}} MB<extra></extra>",
        }
        for name, (meaning, line) in DIRECTIONS.items()
    ]
    preempted = np.flatnonzero(steps["preempted"])
    preempted = preempted[np.unique(np.linspace(0, len(preempted) - 1, min(limit, len(preempted))).astype(int))]
    traces.append(
        {
            **shared,
            "mode": "markers",
            "name": "preempted",
            "legendgroup": "preempted",
            "x": floats(steps["start_s"][preempted], 4),
            "y": floats(sums["swapped_out_bytes"][preempted], 4),
            "customdata": steps["preempted"][preempted].astype(int).tolist(),
            "marker": {"symbol": "x", "size": 7, "color": "@dead"},
            "hovertemplate": "%{customdata} preempted at %{x:.2f} s<extra></extra>",
        }
    )
    return traces


def _table(seen: Sequence[tuple[Arm, TrialRecord]], found: Sequence[dict[str, Floats]]) -> Table:
    rows = [
        [
            text_cell(arm.name),
            number_cell(float(steps["preempted"].sum()), 0),
            *(Cell(byte_size(total), total) for total in (float(steps[name].sum()) for name in DIRECTIONS)),
            number_cell(float(steps["swap_s"].sum()), 3),
        ]
        for (arm, _), steps in zip(seen, found, strict=True)
    ]
    return Table(("arm", "preemptions", "swapped out", "swapped in", "copying (s)"), rows)
