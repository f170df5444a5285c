"""Speculative decoding: tokens drafted in a step and tokens of them that the target accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harness.report.data import Arm, Report
from harness.report.panels import axis_key, axis_name, panel_arms, panel_title, stack, time_range, which_trials
from harness.report.parts import Cell, Chart, Table, floats, number, percent, text_cell
from harness.report.sampling import extremes

STEPS_A_PANEL = 500
PANEL_PX = 150
COUNTS = ("draft_tokens", "accepted_tokens")
METRICS: tuple[tuple[str, Callable[[float | None], str]], ...] = (
    ("acceptance_rate", percent),
    ("tokens_per_step", number),
    ("distinct_4gram_share", percent),
)


def chart(report: Report) -> Chart:
    title = "Speculation: tokens drafted and accepted in each step"
    seen, total = panel_arms(report, lambda trial: bool(trial.steps["draft_tokens"].sum() > 0))
    if not seen:
        return Chart("speculation", title, "", Table((), ()), empty="No arm drafts tokens.")
    layout, height = stack([PANEL_PX] * len(seen), [_title(arm) for arm, _ in seen], time_range(seen))
    layout |= {"showlegend": False, "hovermode": "x"}
    traces: list[dict[str, Any]] = []
    shown = steps = 0
    for index, (_, trial) in enumerate(seen):
        layout[axis_key(index)] |= {"rangemode": "tozero", "nticks": 4, "title": {"text": "tokens a step"}}
        start = trial.steps["start_s"].to_numpy(float)
        counts = [trial.steps[name].to_numpy(float, na_value=np.nan) for name in COUNTS]
        kept = extremes(counts, report.points(STEPS_A_PANEL))
        shown, steps = shown + len(kept), steps + len(start)
        looks: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
            ("drafted", {"color": "@dead", "width": 1.2, "shape": "hv", "dash": "dot"}, {}),
            ("accepted", {"color": "@used", "width": 1.2, "shape": "hv"}, {"fill": "tozeroy", "fillcolor": "@ahead"}),
        )
        traces += [
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": floats(start[kept], 4),
                "y": floats(values[kept], 0),
                "line": line,
                "yaxis": axis_name(index),
                "hovertemplate": f"{name} %{{y}}<extra></extra>",
                **fill,
            }
            for (name, line, fill), values in zip(looks, counts, strict=True)
        ]
    note = (
        f"{which_trials(seen, total)} Dotted: drafted; filled: accepted (the bonus token is no acceptance). "
        f"{shown:,} of {steps:,} steps, extremes kept. A low share of distinct 4-grams means repetitive text, which "
        "flatters speculation."
    )
    return Chart("speculation", title, note, _table([arm for arm, _ in seen]), traces, layout, height)


def _title(arm: Arm) -> str:
    return panel_title(arm, f"{percent(arm.metrics.get('acceptance_rate'), 0)} accepted")


def _table(arms: list[Arm]) -> Table:
    rows = []
    for arm in arms:
        trials = arm.figures.trials
        drafted, accepted = sum(t.draft_tokens for t in trials), sum(t.accepted_tokens for t in trials)
        cells = [arm.cell(name, text) for name, text in METRICS]
        rows.append([text_cell(arm.name), Cell(f"{drafted:,}", drafted), Cell(f"{accepted:,}", accepted), *cells])
    columns = ("arm", "drafted (all trials)", "accepted", "acceptance rate", "tokens a step", "distinct 4-grams")
    return Table(columns, rows)
