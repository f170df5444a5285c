"""Speculation: the decode speed-up that its own figures predict, beside the one that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from harness.report.bars import AROUND_PX, ROW_PX, rows_axis
from harness.report.charts.verdict import HEADLINE, RatioCell, ratio_cell
from harness.report.data import Arm, Report, middle
from harness.report.parts import (
    LEGEND_ABOVE,
    MISSING,
    Cell,
    Chart,
    Table,
    floats,
    label,
    number,
    number_cell,
    percent,
    percent_cell,
    text_cell,
)
from harness.report.prediction import Prediction
from harness.statistics import ratio

LOOKS = {"predicted": ("@phase4", "diamond-open"), "measured": ("@used", "circle")}


def prediction(arm: Arm) -> Prediction:
    """Medians over its ok trials."""
    found = [trial.prediction for trial in arm.figures.trials]
    names = [field.name for field in fields(Prediction)]
    return Prediction(**{n: middle(v for each in found if (v := getattr(each, n)) is not None) for n in names})


def decode_rates(arm: Arm | None) -> dict[int, float]:
    """Trial number -> tokens a second that a sequence gets in steps that prefill nothing."""
    trials = [] if arm is None else arm.figures.trials
    return {trial.trial: trial.decode_rate for trial in trials if trial.decode_rate is not None}


def measured(report: Report, arm: Arm) -> Mapping[str, float | None]:
    """Ratio of the decode rates to those of the arm below, paired by trial: median, low and high."""
    below = report.below(arm)
    comparable = below is not None and not (arm.emulated or below.emulated)
    adaptive = bool(report.plan.get("half_width"))
    found = ratio(HEADLINE, decode_rates(arm), decode_rates(below), comparable=comparable, adaptive=adaptive)
    return {"median": found.median, "low": found.low, "high": found.high}


def chart(report: Report) -> Chart:
    title = "Speculation: predicted beside measured"
    seen = [arm for arm in report.arms if any(trial.draft_tokens > 0 for trial in arm.figures.trials)]
    found = [(arm, prediction(arm), measured(report, arm)) for arm in seen]
    if not any(ours.speedup or theirs["median"] for _, ours, theirs in found):
        nothing = "No ok trial of an arm that drafts can be predicted or compared."
        return Chart("speedup", title, "", Table((), ()), empty=nothing)
    points = {"predicted": [ours.speedup for _, ours, _ in found], "measured": [m["median"] for _, _, m in found]}
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": floats(values, 4),
            "y": list(range(len(found))),
            "marker": {"color": colour, "symbol": symbol, "size": 11, "line": {"width": 2}},
            "hovertemplate": f"{name} %{{x:.2f}}x<extra></extra>",
        }
        for (name, values), (colour, symbol) in zip(points.items(), LOOKS.values(), strict=True)
    ]
    traces[1]["error_x"] = {
        "type": "data",
        "symmetric": False,
        "array": floats([_gap(m["high"], m["median"]) for _, _, m in found], 4),
        "arrayminus": floats([_gap(m["median"], m["low"]) for _, _, m in found], 4),
        "color": LOOKS["measured"][0],
        "thickness": 1.6,
    }
    layout = {
        "xaxis": {"title": {"text": "decode speed-up (x)"}},
        "yaxis": rows_axis([label(arm.name, 28) for arm in seen]),
        "shapes": [{"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": "@muted"}}],
        "legend": LEGEND_ABOVE,
        "showlegend": True,
        "hovermode": "closest",
    }
    note = (
        "Predicted = (1 + d m) / (v + c). d: of the sequences that a step decodes, the share with drafts; m: tokens "
        "accepted of such a sequence; v: the forward passes over all rows, c: the drafting, both in forward passes "
        "over the same sequences without drafts, by what that many rows took in warm-up. It leaves out sampling and "
        "longer contexts. Measured: tokens a second that a decoding sequence gets, against the other arm, paired by "
        "trial. Both of steps that prefill nothing; medians over the ok trials."
    )
    return Chart("speedup", title, note, _table(report, found), traces, layout, AROUND_PX + ROW_PX * len(seen))


def _gap(more: float | None, less: float | None) -> float | None:
    return None if more is None or less is None else more - less


def _table(report: Report, found: list[tuple[Arm, Prediction, Mapping[str, float | None]]]) -> Table:
    rows = []
    for arm, ours, theirs in found:
        below, m = report.below(arm), arm.metrics
        kind = "step_ratios" if arm.entry["versus"] else "ratios"
        speed = RatioCell("") if below is None else ratio_cell(arm, kind, HEADLINE, below.name)
        rows.append(
            [
                text_cell(arm.name),
                Cell(
                    percent(m.get("acceptance_rate")),
                    m.get("acceptance_rate"),
                    (arm.name, "metrics", "acceptance_rate"),
                ),
                Cell(
                    number(m.get("tokens_per_step")), m.get("tokens_per_step"), (arm.name, "metrics", "tokens_per_step")
                ),
                percent_cell(ours.drafting),
                *(number_cell(value, 2) for value in (ours.accepted, ours.verify)),
                number_cell(ours.propose, 3),
                _times(ours.speedup),
                _times(**theirs),
                text_cell(None if below is None else below.name),
                Cell(speed.text or MISSING, speed.value, speed.source),
            ]
        )
    columns = (
        *("arm", "acceptance rate", "tokens a step", "d: drafting share", "m: accepted", "v: forward / plain"),
        *("c: draft / plain", "predicted", "measured", "measured against", "output tok/s"),
    )
    return Table(columns, rows)


def _times(median: float | None, low: float | None = None, high: float | None = None) -> Cell:
    if median is None:
        return Cell(MISSING)
    return Cell(
        f"{median:.2f}x" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else ""), median
    )
