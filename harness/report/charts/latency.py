"""Distributions of the time to the first token and between tokens, request by request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.metrics import PERCENTILES, Window, emission_gaps, request_latencies
from harness.records import TrialRecord
from harness.report.data import Arm, Report
from harness.report.parts import LEGEND_ABOVE, Cell, Chart, Table, floats, label, number, text_cell
from harness.report.sampling import ranks

POINTS_A_LINE = 400

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Latency:
    """``scale`` and ``unit``: of the axis and the table; ``values``: seconds, one trial's."""

    key: str
    metric: str
    title: str
    unit: str
    scale: float
    counted: str
    values: Callable[[TrialRecord], Floats]


def ttft_values(trial: TrialRecord) -> Floats:
    """TTFT of the requests that its percentiles count: a failed one is inf, a rejected one is left out."""
    latencies = request_latencies(trial.requests)
    window = Window(*(trial.run["window"][name] for name in ("rule", "start_s", "end_s")))
    values: Floats = latencies["ttft_s"].to_numpy(float)
    if window.rule == "timed":
        values = values[window.holds(trial.requests["intended_s"].to_numpy(float))]
    return values[~np.isnan(values)]


def itl_values(trial: TrialRecord) -> Floats:
    """The gaps between tokens that its percentiles count."""
    window = Window(*(trial.run["window"][name] for name in ("rule", "start_s", "end_s")))
    counted = (trial.requests["finish_reason"] != "rejected").to_numpy(bool)
    if window.rule == "timed":
        counted = counted & window.holds(trial.requests["intended_s"].to_numpy(float))
    gaps, _ = emission_gaps(trial.requests[counted])
    return gaps


TTFT = Latency("ttft", "ttft_s", "Time to first token, from the intended arrival", "s", 1.0, "requests", ttft_values)
ITL = Latency("itl", "itl_s", "Inter-token latency", "ms", 1e3, "gaps", itl_values)


def chart(report: Report, what: Latency) -> Chart:
    limit = report.points(POINTS_A_LINE)
    traces: list[dict[str, Any]] = []
    shown = total = endless = 0
    for arm in report.arms:
        values = np.sort(np.concatenate([np.empty(0), *(what.values(trial) for trial in arm.ok)]))
        finite = values[np.isfinite(values)]
        if not len(finite):
            continue
        kept = ranks(len(finite), limit)
        shown, total, endless = shown + len(kept), total + len(finite), endless + len(values) - len(finite)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{label(arm.name, 32)} (n {len(values):,})",
                "x": floats((finite[kept] * what.scale).tolist()),
                # Of all, the endless ones included: a curve that stops below 100 % lost requests.
                "y": floats((100 * (kept + 1) / len(values)).tolist(), 3),
                "line": {"color": arm.colour, "dash": arm.dash, "width": 2, "shape": "hv"},
                "hovertemplate": f"%{{y:.1f}} % within %{{x:.4g}} {what.unit}<extra>%{{fullData.name}}</extra>",
            }
        )
    if not traces:
        return Chart(what.key, what.title, "", Table((), ()), empty=f"No arm has a finished trial with {what.counted}.")
    layout = {
        "xaxis": {"type": "log", "title": {"text": f"{what.key.upper()} ({what.unit}, log scale)"}, "dtick": "D2"},
        "yaxis": {"title": {"text": f"share of {what.counted} (%)"}, "range": [0, 101]},
        "legend": LEGEND_ABOVE,
        "showlegend": True,
        "hovermode": "closest",
    }
    note = f"All ok trials of an arm pooled; {shown:,} of {total:,} values drawn, the slowest 100 always among them."
    if endless:
        note += f" {endless:,} failed and count as infinite: their curve ends below 100 %."
    note += " The table gives the median over trials of each trial's percentile, by nearest rank."
    return Chart(what.key, what.title, note, _table(report.arms, what), traces, layout, 380)


def _table(arms: list[Arm], what: Latency) -> Table:
    parts = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    rows = []
    for arm in arms:
        cells = [(part, arm.metrics.get(f"{what.metric}.{part}")) for part in parts]
        n = arm.metrics.get(f"{what.metric}.n")
        rows.append(
            [
                text_cell(arm.name),
                *(
                    Cell(number(value, 2, what.scale), value, (arm.name, "metrics", f"{what.metric}.{part}"))
                    for part, value in cells
                ),
                Cell(number(n, 0), n, (arm.name, "metrics", f"{what.metric}.n")),
            ]
        )
    return Table(("arm", *(f"{part} ({what.unit})" for part in parts), "n a trial"), rows)
