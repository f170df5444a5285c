"""Where a step's time goes."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.report.data import Arm, Report
from harness.report.parts import LEGEND_ABOVE, Chart, Table, floats, label, number_cell, percent_cell, text_cell

PHASES = {
    "schedule": ("@phase0", ""),
    "prepare": ("@phase1", "/"),
    "forward": ("@phase2", ""),
    "sample": ("@phase3", "\\"),
    "propose": ("@phase4", "x"),
    "commit": ("@phase5", "."),
    "other": ("@muted", "-"),
}
ROW_PX = 34


def phase_seconds(arm: Arm) -> dict[str, float]:
    """Seconds by phase over all ok trials; ``other`` is what of the steps' time no phase claims."""
    trials = arm.ok
    seconds = {
        phase: float(sum(np.nansum(trial.steps[f"{phase}_s"].to_numpy(float)) for trial in trials))
        for phase in PHASES
        if phase != "other"
    }
    total = float(sum((trial.steps["end_s"] - trial.steps["start_s"]).sum() for trial in trials))
    return {**seconds, "other": max(0.0, total - sum(seconds.values()))}


def chart(report: Report) -> Chart:
    title = "Where a step's time goes"
    found = {arm.name: phase_seconds(arm) for arm in report.arms if any(len(trial.steps) for trial in arm.ok)}
    seen = [arm for arm in report.arms if sum(found.get(arm.name, {}).values()) > 0]
    if not seen:
        return Chart("steptime", title, "", Table((), ()), empty="No ok trial recorded the time of its steps.")
    names = [label(arm.name, 28) for arm in seen]
    traces: list[dict[str, Any]] = []
    for phase, (colour, pattern) in PHASES.items():
        shares = [100 * found[arm.name][phase] / sum(found[arm.name].values()) for arm in seen]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": phase,
                "x": floats(shares, 3),
                "y": list(range(len(seen))),
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
                "hovertemplate": f"{phase} %{{x:.2f}} %<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {"title": {"text": "share of the steps' time (%)"}, "range": [0, 100]},
        "yaxis": {
            "tickmode": "array",
            "tickvals": list(range(len(seen))),
            "ticktext": names,
            "range": [len(seen) - 0.5, -0.5],
            "showgrid": False,
            "automargin": True,
        },
        "legend": {**LEGEND_ABOVE, "traceorder": "normal"},
        "showlegend": True,
        "hovermode": "closest",
    }
    note = "All steps of all ok trials, drain included; other: what no phase claims."
    return Chart("steptime", title, note, _table(seen, found), traces, layout, 118 + ROW_PX * len(seen))


def _table(arms: list[Arm], found: dict[str, dict[str, float]]) -> Table:
    rows = []
    for arm in arms:
        seconds = found[arm.name]
        total, steps = sum(seconds.values()), sum(len(trial.steps) for trial in arm.ok)
        shares = (percent_cell(seconds[phase] / total) for phase in PHASES)
        rows.append([text_cell(arm.name), number_cell(steps, 0), number_cell(1e3 * total / steps, 2), *shares])
    return Table(("arm", "steps (n)", "mean step (ms)", *PHASES), rows)
