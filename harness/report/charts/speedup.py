"""Speculation: the decode speed-up that its own figures predict, beside the one that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from harness.records import TrialRecord
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

ITL = "itl_s.mean"
LOOKS = {"predicted": ("@phase4", "diamond-open"), "measured": ("@used", "circle")}


@dataclass(frozen=True)
class Prediction:
    """One trial's, or the medians of an arm's. None where a record lacks what a figure needs.

    drafting: of the sequences that a step decodes, the share whose drafts it verifies. accepted: tokens accepted in
    such a step of such a sequence. verify, propose: cost of a step with full drafts and of drafting, in forward passes
    of a step without drafts.
    """

    drafting: float | None
    accepted: float | None
    verify: float | None
    propose: float | None
    speedup: float | None


def predict(trial: TrialRecord) -> Prediction:
    steps = trial.steps
    decoded = float(steps["decode_tokens"].sum())  # a sequence that decodes has one, its drafts aside
    drafted = float(steps["drafting_sequences"].sum()) if steps["drafting_sequences"].notna().all() else 0.0
    d = drafted / decoded if drafted and decoded else None
    m = float(steps["accepted_tokens"].sum()) / drafted if drafted else None
    cost = (trial.run.get("verify_cost") or {}).get("step_s") or {}
    plain, full = cost.get("plain"), cost.get("verify")
    if not plain or not full:
        return Prediction(d, m, None, None, None)
    v, c = full / plain, float(steps["propose_s"].mean()) / plain
    speedup = None if d is None or m is None else (1 + d * m) / ((1 - d) + d * v + c)
    return Prediction(d, m, v, c, speedup)


def prediction(arm: Arm) -> Prediction:
    """Medians over its ok trials."""
    found = [predict(trial) for trial in arm.ok]
    names = [field.name for field in fields(Prediction)]
    return Prediction(**{n: middle(v for each in found if (v := getattr(each, n)) is not None) for n in names})


def measured(report: Report, arm: Arm) -> Mapping[str, float | None]:
    """How many times faster than the arm below tokens followed one another: median, low and high of the summary."""
    ratios = arm.entry["step_ratios"] if arm.entry["versus"] else arm.entry["ratios"]
    found = ratios.get(ITL) or {} if report.below(arm) is not None else {}
    ends = {"median": "median", "low": "high", "high": "low"}  # of reciprocals
    return {end: 1 / found[other] if found.get(other) else None for end, other in ends.items()}


def chart(report: Report) -> Chart:
    title = "Speculation: predicted beside measured"
    seen = [arm for arm in report.arms if any(trial.steps["draft_tokens"].sum() > 0 for trial in arm.ok)]
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
        "Predicted = (1 + d m) / ((1 - d) + d v + c). d: of the sequences that a step decodes, the share with drafts; "
        "m: tokens accepted of such a sequence; v: a forward pass over full drafts, c: a step's mean time for "
        "drafting, both in forward passes without drafts, as timed in warm-up at full batch and short context. "
        "It leaves out prefill, sampling, drafts shorter than full, longer contexts and a batch whose size changes. "
        "Measured: mean ITL of the other arm over this arm's, paired by trial, with the interval of the summary. "
        "Medians over the ok trials."
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
        *("arm", "acceptance rate", "tokens a step", "d: drafting share", "m: accepted", "v: verify / plain"),
        *("c: draft / plain", "predicted", "measured", "measured against", "output tok/s"),
    )
    return Table(columns, rows)


def _times(median: float | None, low: float | None = None, high: float | None = None) -> Cell:
    if median is None:
        return Cell(MISSING)
    return Cell(
        f"{median:.2f}x" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else ""), median
    )
