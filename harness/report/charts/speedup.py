"""Speculation: the decode speed-up that its own figures predict, beside the one that was measured."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from harness.report.against import following, name_cell, ratio_cell, ratio_to
from harness.report.bars import AROUND_PX, ROW_PX, rows_axis
from harness.report.charts.verdict import HEADLINE, below_cell
from harness.report.data import Arm, Report, middle
from harness.report.parts import (
    LEGEND_ABOVE,
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
    times,
)
from harness.report.prediction import Prediction
from harness.statistics import Ratio

LOOKS = {"predicted": ("@phase4", "diamond-open"), "measured": ("@used", "circle")}
DECODE_RATE = "decode_rate"  # what `decode_rates` are called where a reader compares arms


def prediction(arm: Arm) -> Prediction:
    """Medians over its ok trials."""
    found = [trial.prediction for trial in arm.figures.trials]
    names = [field.name for field in fields(Prediction)]
    return Prediction(**{n: middle(v for each in found if (v := getattr(each, n)) is not None) for n in names})


def decode_rates(arm: Arm | None) -> dict[int, float]:
    """Trial number -> tokens a second that a sequence gets in steps that prefill nothing."""
    trials = [] if arm is None else arm.figures.trials
    return {trial.trial: trial.decode_rate for trial in trials if trial.decode_rate is not None}


def measured(report: Report, arm: Arm, other: Arm | None) -> Ratio:
    """Of the decode rates, arm over other, paired by trial."""
    return ratio_to(report, arm, other, decode_rates(arm), decode_rates(other))


def chart(report: Report) -> Chart:
    title = "Speculation: predicted beside measured"
    seen = [arm for arm in report.arms if any(trial.draft_tokens > 0 for trial in arm.figures.trials)]
    found = [(arm, prediction(arm), measured(report, arm, report.below(arm))) for arm in seen]
    if not any(ours.speedup or theirs.median for _, ours, theirs in found):
        nothing = "No ok trial of an arm that drafts can be predicted or compared."
        return Chart("speedup", title, "", Table((), ()), empty=nothing)
    points = {"predicted": [ours.speedup for _, ours, _ in found], "measured": [m.median for _, _, m in found]}
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": floats(values, 4),
            "y": list(range(len(found))),
            "marker": {"color": colour, "symbol": symbol, "size": 11, "line": {"width": 2, "color": colour}},
            "hovertemplate": f"{name} %{{x:.2f}}x<extra></extra>",
        }
        for (name, values), (colour, symbol) in zip(points.items(), LOOKS.values(), strict=True)
    ]
    traces[1]["error_x"] = {
        "type": "data",
        "symmetric": False,
        "array": floats([_gap(m.high, m.median) for _, _, m in found], 4),
        "arrayminus": floats([_gap(m.median, m.low) for _, _, m in found], 4),
        "color": LOOKS["measured"][0],
        "thickness": 1.6,
    }
    traces[1]["meta"] = following(DECODE_RATE, seen)
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
        "longer contexts. Measured: tokens a second that a decoding sequence gets, paired by trial, against the arm it "
        "builds on or, if one is chosen above, another baseline; the prediction stays one against the same arm without "
        f"drafts. Both of steps that prefill nothing; medians over the ok trials, {percent(report.confidence, 0)} "
        "intervals."
    )
    return Chart("speedup", title, note, _table(report, found), traces, layout, AROUND_PX + ROW_PX * len(seen))


def _gap(more: float | None, less: float | None) -> float | None:
    return None if more is None or less is None else more - less


def _table(report: Report, found: list[tuple[Arm, Prediction, Ratio]]) -> Table:
    rows = []
    for arm, ours, theirs in found:
        below = report.below(arm)
        rows.append(
            [
                text_cell(arm.name),
                arm.cell("acceptance_rate", percent),
                arm.cell("tokens_per_step", number),
                percent_cell(ours.drafting),
                *(number_cell(value, 2) for value in (ours.accepted, ours.verify)),
                number_cell(ours.propose, 3),
                Cell(times(ours.speedup, None, None), ours.speedup),
                ratio_cell(theirs, DECODE_RATE),
                name_cell(below),
                below_cell(arm, below, HEADLINE),
            ]
        )
    columns = (
        *("arm", "acceptance rate", "tokens a step", "d: drafting share", "m: accepted", "v: forward / plain"),
        *("c: draft / plain", "predicted", "measured", "measured against", "output tok/s"),
    )
    return Table(columns, rows)
