"""Speculative decoding: tokens drafted in a step, those of them that the target accepted, and its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harness.report.data import Arm, Report
from harness.report.figures import own_tokens
from harness.report.panels import axis_key, axis_name, panel_arms, panel_title, stack, time_range, which_trials
from harness.report.parts import Chart, Table, floats, number, number_cell, percent, text_cell
from harness.report.sampling import extremes

STEPS_A_PANEL = 500
PANEL_PX = 150
COUNTS = ("draft_tokens", "accepted_tokens", "emitted_tokens")
OWN = "the target's own"
METRICS: tuple[tuple[str, Callable[[float | None], str]], ...] = (
    ("acceptance_rate", percent),
    ("tokens_per_step", number),
    ("distinct_4gram_share", percent),
)


def chart(report: Report) -> Chart:
    title = "Speculation: tokens drafted, accepted, and the target's own, in each step"
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
        known = {name: trial.steps[name].to_numpy(float, na_value=np.nan) for name in COUNTS}
        own = own_tokens(known)
        counts = [known["draft_tokens"], known["accepted_tokens"], *([] if np.isnan(own).any() else [own])]
        kept = extremes(counts, report.points(STEPS_A_PANEL))
        shown, steps = shown + len(kept), steps + len(start)
        looks: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
            ("drafted", {"color": "@dead", "width": 1.2, "shape": "hv", "dash": "dot"}, {}),
            ("accepted", {"color": "@used", "width": 1.2, "shape": "hv"}, {"fill": "tozeroy", "fillcolor": "@ahead"}),
            (OWN, {"color": "@ink", "width": 1.2, "shape": "hv", "dash": "dash"}, {}),
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
            for (name, line, fill), values in zip(looks, counts, strict=False)  # the last one may not be known
        ]
    own_note = "the target's own are not in these records"
    if any(trace["name"] == OWN for trace in traces):
        own_note = (
            "dashed: the target's own, one a sequence (behind drafts the recovered or, where all stand, the bonus "
            "token: neither is an acceptance)"
        )
    note = (
        f"{which_trials(seen, total)} Dotted: drafted; filled: accepted; {own_note}. "
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
        known = [t.own_tokens for t in trials if t.own_tokens is not None]
        own = sum(known) if len(known) == len(trials) else None
        counts = [number_cell(value, 0) for value in (drafted, accepted, own)]
        rows.append([text_cell(arm.name), *counts, *(arm.cell(name, text) for name, text in METRICS)])
    columns = ("arm", "drafted (all trials)", "accepted", OWN, "acceptance rate", "tokens a step")
    return Table((*columns, "distinct 4-grams"), rows)
