"""Each request's life: how long it waited, prefilled and decoded, and what ran beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.records import TrialRecord
from harness.report.data import Arm, Report
from harness.report.panels import axis_key, axis_name, panel_arms, panel_title, stack, time_range, which_trials
from harness.report.parts import Chart, Table, counted, fixed, floats, label, number_cell, text_cell

Floats = npt.NDArray[np.float64]

# Phase -> meaning and fill.
PHASES: dict[str, tuple[str, dict[str, Any]]] = {
    "queueing": (
        "waiting",
        {"color": "@deadback", "pattern": {"shape": "/", "size": 4, "solidity": 0.35, "fgcolor": "@dead"}},
    ),
    "prefill": ("until its first token", {"color": "@prefill"}),
    "decode": ("decoding", {"color": "@used"}),
}
MAX_REQUESTS = 150
PANEL_PX, LEAST_PX, ROW_PX = 120, 44, 14
COLUMNS = (("queueing_s", "queueing"), ("ttft_s", "TTFT"), ("e2e_s", "E2E"))


@dataclass(frozen=True)
class Lives:
    """Requests by intended arrival, seconds since the run's start. ``starts``, ``ends`` by phase, NaN where it had
    none; a request that never came further has been in its last phase until it ended, or until the run did.
    """

    request_ids: list[str]
    starts: dict[str, Floats]
    ends: dict[str, Floats]


def request_lives(trial: TrialRecord) -> Lives:
    """A rejected request has no phase at all: nothing waited for anything."""
    requests = trial.requests.sort_values("intended_s", kind="stable")
    arrived, scheduled, first, finished = (
        requests[f"{name}_s"].to_numpy(float) for name in ("intended", "scheduled", "first_token", "finished")
    )
    last = float(trial.steps["end_s"].max()) if len(trial.steps) else 0.0
    finished = np.where(np.isnan(finished), np.fmax(last, arrived), finished)
    arrived = np.where((requests["finish_reason"] == "rejected").to_numpy(bool), np.nan, arrived)
    until_scheduled = np.where(np.isnan(scheduled), finished, scheduled)
    until_first = np.where(np.isnan(first), finished, first)
    return Lives(
        [str(request_id) for request_id in requests["request_id"]],
        {"queueing": arrived, "prefill": scheduled, "decode": first},
        {"queueing": until_scheduled, "prefill": until_first, "decode": finished},
    )


def chart(report: Report) -> Chart:
    title = "Requests: waiting, prefill and decoding of each"
    drawn, total = panel_arms(report, lambda trial: len(trial.requests) > 0)
    if not drawn:
        return Chart("gantt", title, "", Table((), ()), empty="No arm recorded a request.")
    limit = report.points(MAX_REQUESTS, 40)
    seen = [(arm, request_lives(trial)) for arm, trial in drawn]
    heights = [min(PANEL_PX, max(LEAST_PX, ROW_PX * min(limit, len(lives.request_ids)))) for _, lives in seen]
    layout, height = stack(heights, [_title(arm, lives) for arm, lives in seen], time_range(drawn))
    layout |= {"barmode": "overlay", "bargap": 0, "showlegend": False, "hovermode": "closest"}
    traces: list[dict[str, Any]] = []
    shown = requests = 0
    for index, (_, lives) in enumerate(seen):
        rows = min(limit, len(lives.request_ids))
        shown, requests = shown + rows, requests + len(lives.request_ids)
        layout[axis_key(index)] |= {
            **{"range": [rows - 0.5, -0.5], "tick0": 0, "dtick": max(1, math.ceil(rows / 4)), "showgrid": False},
            "title": {"text": "request"},
        }
        traces += _traces(lives, rows, axis_name(index))
    note = (
        f"{which_trials(drawn, total)} A row is a request, in the order of their intended arrivals. Hatched: it waits "
        "to be scheduled; faint: scheduled, no token yet; strong: decoding, preemptions included. "
        f"{shown:,} of {requests:,} requests, the first of each arm."
    )
    return Chart("gantt", title, note, _table([arm for arm, _ in seen]), traces, layout, height)


def _title(arm: Arm, lives: Lives) -> str:
    return panel_title(arm, counted(len(lives.request_ids), "request"))


def _traces(lives: Lives, rows: int, axis: str) -> list[dict[str, Any]]:
    traces = []
    for phase, (meaning, marker) in PHASES.items():
        starts, ends = lives.starts[phase][:rows], lives.ends[phase][:rows]
        there = np.flatnonzero(ends > starts)  # false for NaN
        if not len(there):
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": meaning,
                "base": floats(starts[there], 3),
                "x": floats((ends - starts)[there], 3),
                "y": there.tolist(),
                "width": 0.84,
                "marker": {**marker, "line": {"width": 0}},
                "text": [label(lives.request_ids[row], 40) for row in there],
                "textposition": "none",
                "hovertemplate": f"%{{text}}: {meaning} %{{x:.3f}} s, from %{{base:.3f}} s<extra></extra>",
                "yaxis": axis,
            }
        )
    return traces


def _table(arms: list[Arm]) -> Table:
    parts = ("p50", "p99")
    rows = []
    for arm in arms:
        cells = [text_cell(arm.name), number_cell(arm.metrics.get("queueing_s.n"), 0)]
        for metric, _ in COLUMNS:
            cells += [arm.cell(f"{metric}.{part}", fixed(3)) for part in parts]
        rows.append(cells)
    named = [f"{shown} {part} (s)" for _, shown in COLUMNS for part in parts]
    return Table(("arm", "requests a trial (n)", *named), rows)
