"""Distributions of the time to the first token, between tokens and to the last one, request by request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.distribution import PERCENTILES
from harness.report.data import Arm, Report
from harness.report.legends import legend
from harness.report.parts import Chart, Table, fixed, floats, label, text_cell


@dataclass(frozen=True)
class Latency:
    """``scale`` and ``unit``: of the axis and the table."""

    key: str
    metric: str
    title: str
    unit: str
    scale: float
    counted: str


TTFT = Latency("ttft", "ttft_s", "Time to first token, from the intended arrival", "s", 1.0, "requests")
ITL = Latency("itl", "itl_s", "Inter-token latency", "ms", 1e3, "gaps")
E2E = Latency("e2e", "e2e_s", "End-to-end latency, from the intended arrival to the last token", "s", 1.0, "requests")


def chart(report: Report, what: Latency) -> Chart:
    traces: list[dict[str, Any]] = []
    shown = total = endless = 0
    for arm in report.arms:
        curve = arm.figures.curves[what.metric]
        if not curve.n_finite:
            continue
        shown, total, endless = shown + len(curve.values), total + curve.n_finite, endless + curve.n - curve.n_finite
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{label(arm.name, 32)} (n {curve.n:,})",
                "x": floats((curve.values * what.scale).tolist()),
                # Of all, the endless ones included: a curve that stops below 100 % lost requests.
                "y": floats((100 * (curve.ranks + 1) / curve.n).tolist(), 3),
                "line": {"color": arm.colour, "dash": arm.dash, "width": 2, "shape": "hv"},
                "hovertemplate": f"%{{y:.1f}} % within %{{x:.4g}} {what.unit}<extra>%{{fullData.name}}</extra>",
            }
        )
    if not traces:
        return Chart(what.key, what.title, "", Table((), ()), empty=f"No arm has a finished trial with {what.counted}.")
    names, height, wide = legend(len(traces), 380)
    layout = {
        **names,
        "xaxis": {"type": "log", "title": {"text": f"{what.key.upper()} ({what.unit}, log scale)"}, "dtick": "D2"},
        "yaxis": {"title": {"text": f"share of {what.counted} (%)"}, "range": [0, 101]},
        "hovermode": "closest",
    }
    note = f"All ok trials of an arm pooled; {shown:,} of {total:,} values drawn, the slowest 100 always among them."
    if endless:
        note += f" {endless:,} failed and count as infinite: their curve ends below 100 %."
    note += " The table gives the median over trials of each trial's percentile, by nearest rank."
    return Chart(what.key, what.title, note, _table(report.arms, what), traces, layout, height, wide=wide)


def _table(arms: list[Arm], what: Latency) -> Table:
    parts = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    rows = [
        [
            text_cell(arm.name),
            *(arm.cell(f"{what.metric}.{part}", fixed(2, what.scale)) for part in parts),
            arm.cell(f"{what.metric}.n", fixed(0)),
        ]
        for arm in arms
        if arm.metrics
    ]
    return Table(("arm", *(f"{part} ({what.unit})" for part in parts), "n a trial"), rows)
