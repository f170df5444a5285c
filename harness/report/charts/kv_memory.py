"""KV memory over time: what each reserved position is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.records import TrialRecord
from harness.report.charts.slots import panel_height, used_slots
from harness.report.data import Arm, Report
from harness.report.panels import axis_key, axis_name, panel_arms, panel_title, stack, time_range, which_trials
from harness.report.parts import Chart, Table, floats, number_cell, percent, text_cell
from harness.report.sampling import extremes

# Part -> meaning and fill; hatching carries what colour alone may not.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "used": ("used", {"fillcolor": "@used"}),
    "reserved_ahead": ("reserved ahead", {"fillcolor": "@ahead"}),
    "internal": (
        "internal waste",
        {"fillpattern": {"shape": "/", "size": 6, "solidity": 0.3, "fgcolor": "@dead", "bgcolor": "@deadback"}},
    ),
    "unusable": (
        "unusable",
        {"fillpattern": {"shape": "x", "size": 6, "solidity": 0.3, "fgcolor": "@ink", "bgcolor": "@paper"}},
    ),
    "free": ("free", {"fillcolor": "@free"}),
}
STEPS_A_PANEL = 400

Floats = npt.NDArray[np.float64]


def kv_parts(steps: pd.DataFrame) -> dict[str, Floats]:
    """Tokens by part and step, adding up to the capacity."""
    capacity = steps["kv_capacity_tokens"].to_numpy(float, na_value=np.nan)
    parts = {
        name: np.nan_to_num(steps[f"kv_{name}_tokens"].to_numpy(float, na_value=np.nan))
        for name in PARTS
        if name != "free"
    }
    parts["free"] = np.maximum(0.0, np.nan_to_num(capacity) - sum(parts.values()))
    return parts


def chart(report: Report) -> Chart:
    seen, total = panel_arms(report, _shows_one_cache)
    title = "KV cache: what every position of the budget is for"
    if not seen:
        return Chart("kv", title, "", Table((), ()), empty="No arm recorded how its KV cache was filled.")
    limit = report.points(STEPS_A_PANEL)
    heights = [panel_height(used_slots(trial)) for _, trial in seen]  # level with the panels of the slots
    layout, height = stack(heights, [_title(arm) for arm, _ in seen], time_range(seen))
    layout |= {"showlegend": False, "hovermode": "x", "shapes": []}
    traces: list[dict[str, Any]] = []
    shown = steps = 0
    for index, (_, trial) in enumerate(seen):
        found = kv_parts(trial.steps)
        capacity = float(np.sum(list(found.values()), axis=0).max())
        layout[axis_key(index)] |= {
            "range": [0, 1.04 * capacity],
            "nticks": 3,
            "title": {"text": "tokens"},
            "showgrid": False,
        }
        layout["shapes"].append(_line_at(capacity, axis_name(index)))
        kept = extremes([found["used"], found["internal"]], limit)
        shown, steps = shown + len(kept), steps + len(trial.steps)
        # A step's state lasts from its start to the next one's; the last point closes the last step.
        starts, ends = (trial.steps[name].to_numpy(float) for name in ("start_s", "end_s"))
        times = np.append(starts[kept], ends[-1])
        traces += [
            {
                "type": "scatter",
                "mode": "lines",
                "name": meaning,
                "x": floats(times, 4),
                "y": [int(value) for value in np.append(found[part][kept], found[part][-1])],
                "stackgroup": f"arm{index}",
                "line": {"width": 0, "shape": "hv", "color": "@ink"},
                "hovertemplate": f"{meaning} %{{y:,}} tokens<extra></extra>",
                "yaxis": axis_name(index),
                **fill,
            }
            for part, (meaning, fill) in PARTS.items()
            if found[part].any()
        ]
    note = (
        f"{which_trials(seen, total)} Bottom to top: used (blue; a live sequence attends to it), reserved ahead (faint "
        "blue; this request will still write it), internal waste (hatched: never filled, padding, or held by a "
        "finished row), unusable (crossed: free in pieces too small while a request waits), free (blank, up to "
        f"the dotted budget). {shown:,} of {steps:,} steps, extremes kept; shares in the table are weighted by time."
    )
    return Chart("kv", title, note, _table(seen), traces, layout, height)


def _shows_one_cache(trial: TrialRecord) -> bool:
    """Workers have a cache each, and their steps overlap: no one line shows them."""
    return bool(trial.steps["kv_capacity_tokens"].notna().any() and trial.steps["worker"].isna().all())


def _line_at(capacity: float, axis: str) -> dict[str, Any]:
    ends = {"x0": 0, "x1": 1, "xref": "x domain", "y0": capacity, "y1": capacity, "yref": axis}
    return {"type": "line", **ends, "line": {"color": "@muted", "width": 1, "dash": "dot"}, "layer": "above"}


def _title(arm: Arm) -> str:
    used = arm.metrics.get("kv_utilization")
    return panel_title(arm, "" if used is None else f"{percent(used, 0)} of what is held is used")


def _table(seen: Sequence[tuple[Arm, TrialRecord]]) -> Table:
    names = ("kv_utilization", "kv_waste.internal", "kv_waste.reserved_ahead", "kv_waste.unusable")
    rows = []
    for arm, trial in seen:
        rows.append(
            [
                text_cell(arm.name),
                number_cell(float(trial.steps["kv_capacity_tokens"].max()), 0),
                *(arm.cell(name, percent) for name in names),
            ]
        )
    return Table(("arm", "capacity (tokens)", "used", "internal", "reserved ahead", "unusable"), rows)
