"""Speculation: the decode speed-up that its own figures predict, beside the one that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

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
from harness.statistics import ratio

LOOKS = {"predicted": ("@phase4", "diamond-open"), "measured": ("@used", "circle")}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """One trial's, or the medians of an arm's. None where a record lacks what a figure needs.

    drafting: of the sequences that a step decodes, the share whose drafts it verifies. accepted: tokens accepted in
    such a step of such a sequence. verify, propose: the forward passes that were run, and the drafting, in forward
    passes of the same sequences without drafts.
    """

    drafting: float | None
    accepted: float | None
    verify: float | None
    propose: float | None
    speedup: float | None


def decode_steps(trial: TrialRecord, *names: str) -> list[Floats]:
    """Columns of the steps that decode and prefill nothing."""
    prefill, decode = (trial.steps[f"{kind}_tokens"].to_numpy(float, na_value=np.nan) for kind in ("prefill", "decode"))
    kept = (prefill == 0) & (decode > 0)
    return [trial.steps[name].to_numpy(float, na_value=np.nan)[kept] for name in names]


def predict(trial: TrialRecord) -> Prediction:
    """From accepted tokens and from what warm-up says that as many rows cost; the steps' own times are not used."""
    names = ("decode_tokens", "draft_tokens", "drafting_sequences", "accepted_tokens", "propose_s")
    decoded, drafts, drafting, accepted, propose = decode_steps(trial, *names)
    drafted = float(drafting.sum())
    if not drafted > 0:
        return Prediction(None, None, None, None, None)
    d, m = drafted / float(decoded.sum()), float(accepted.sum()) / drafted
    costs = sorted(
        {int(cost["rows"]): float(cost["forward_s"]) for cost in trial.run.get("decode_costs") or []}.items()
    )
    if len(costs) < 2 or min(seconds for _, seconds in costs) <= 0:
        return Prediction(d, m, None, None, None)
    rows, seconds = zip(*costs, strict=True)
    plain = float(np.interp(decoded, rows, seconds).sum())
    v, c = float(np.interp(decoded + drafts, rows, seconds).sum()) / plain, float(propose.sum()) / plain
    return Prediction(d, m, v, c, (1 + d * m) / (v + c))


def prediction(arm: Arm) -> Prediction:
    """Medians over its ok trials."""
    found = [predict(trial) for trial in arm.ok]
    names = [field.name for field in fields(Prediction)]
    return Prediction(**{n: middle(v for each in found if (v := getattr(each, n)) is not None) for n in names})


def decode_rate(trial: TrialRecord) -> float | None:
    """Tokens a second that a sequence gets in steps that prefill nothing."""
    decoded, accepted, start, end = decode_steps(trial, "decode_tokens", "accepted_tokens", "start_s", "end_s")
    spent = float((decoded * (end - start)).sum())
    return float((decoded + accepted).sum()) / spent if spent > 0 else None


def measured(report: Report, arm: Arm) -> Mapping[str, float | None]:
    """Ratio of the decode rates to those of the arm below, paired by trial: median, low and high."""
    below = report.below(arm)
    theirs = {} if below is None else below.by_trial(decode_rate)
    comparable = below is not None and not (arm.emulated or below.emulated)
    adaptive = bool(report.plan.get("half_width"))
    found = ratio(HEADLINE, arm.by_trial(decode_rate), theirs, comparable=comparable, adaptive=adaptive)
    return {"median": found.median, "low": found.low, "high": found.high}


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
        "Predicted = (1 + d m) / (v + c). d: of the sequences that a step decodes, the share with drafts; m: tokens "
        "accepted of such a sequence; v: the forward passes over all rows, c: the drafting, both in forward passes over "
        "the same sequences without drafts, by what that many rows took in warm-up. It leaves out sampling and longer "
        "contexts. Measured: tokens a second that a decoding sequence gets, against the other arm, paired by trial. "
        "Both of steps that prefill nothing; medians over the ok trials."
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
