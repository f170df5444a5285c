"""What speculation gains by the batch: predicted beside measured, and the batch from which on it does not pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness.records import TrialRecord
from harness.report.charts import speedup
from harness.report.charts.verdict import HEADLINE, below_cell
from harness.report.data import Arm, Report
from harness.report.intervals import error_bars, room
from harness.report.legends import legend
from harness.report.parts import (
    Cell,
    Chart,
    Table,
    floats,
    label,
    number_cell,
    percent,
    text_cell,
    times,
)
from harness.speculation import break_even_batch
from harness.statistics import interval

# Settings in which the arms of one line differ.
OF_THE_BATCH = (
    *("batching.max_num_seqs=", "workload.arrivals.concurrency=", "workload.num_requests=", "kv_cache.budget="),
)
SHIFT = 0.04  # of a batch, from one line's points to the next one's
ABOVE, BELOW = "not within the batches measured: above 1", "not within the batches measured: below 1"


@dataclass(frozen=True)
class Gain:
    """A speed-up with its interval, if there is one; None where it is not known."""

    median: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Point:
    """An arm that drafts, at its batch."""

    arm: Arm
    batch: int
    predicted: Gain
    measured: Gain


@dataclass(frozen=True)
class Line:
    """What differs in the batch alone, by batch."""

    name: str
    points: list[Point]

    def break_even(self, kind: str) -> str:
        """``kind``: predicted or measured. The batch at which its medians fall to 1."""
        found = [(p.batch, gain) for p in self.points if (gain := getattr(p, kind).median) is not None]
        batch = break_even_batch(found)
        if batch is not None:
            return f"{batch:.1f}"
        return "" if not found else ABOVE if found[-1][1] >= 1 else BELOW


def lines(report: Report) -> list[Line]:
    """Of each way to speculate that ran at two batches or more."""
    found: dict[tuple[str, ...], list[Point]] = {}
    for arm in report.arms:
        batch = (arm.config.get("batching") or {}).get("max_num_seqs")
        if batch is not None and any(trial.run.get("decode_costs") for trial in arm.ok):
            settings = tuple(s for s in map(str, arm.plan.get("overrides") or ()) if not s.startswith(OF_THE_BATCH))
            found.setdefault(settings, []).append(Point(arm, batch, predicted(report, arm), measured(report, arm)))
    swept = {key: points for key, points in found.items() if len({point.batch for point in points}) > 1}
    common = set.intersection(*(set(key) for key in swept)) if len(swept) > 1 else set()
    return [
        Line(", ".join(_shown(s) for s in key if s not in common), sorted(points, key=lambda point: point.batch))
        for key, points in swept.items()
    ]


def _shown(setting: str) -> str:
    """`eagle` of proposer=eagle, `num_draft_tokens 3` of proposer.num_draft_tokens=3."""
    key, _, value = setting.partition("=")
    return f"{key.rpartition('.')[2]} {value}" if "." in key else value


def predicted(report: Report, arm: Arm) -> Gain:
    """By what its forward passes were timed to take and the drafts that stood, over the ok trials."""

    def of(trial: TrialRecord) -> float | None:
        value = (trial.run["metrics"].get("speculation") or {}).get("predicted_speedup")
        return None if value is None else float(value)

    logs = [math.log(value) for value in arm.by_trial(of).values() if value > 0]
    bounds = interval(logs, report.confidence)
    low, high = (None, None) if bounds is None else (math.exp(bounds[0]), math.exp(bounds[1]))
    return Gain(math.exp(median(logs)) if logs else None, low, high)


def measured(report: Report, arm: Arm) -> Gain:
    """Against the arm that it builds on."""
    found = speedup.measured(report, arm, report.below(arm))
    return Gain(found.median, found.low, found.high)


def chart(report: Report) -> Chart:
    title = "Speculation by batch: predicted beside measured"
    found = lines(report)
    if not found:
        nothing = "Needs arms that draft alike at several batches: study=speculation."
        return Chart("speculationgain", title, "", Table((), ()), empty=nothing)
    shifts = [1 + SHIFT * (index - (len(found) - 1) / 2) for index in range(len(found))]
    traces = [trace for index, line in enumerate(found) for trace in _traces(index, line, shifts[index])]
    names, height, wide = legend(len(traces), 400)
    gains = [gain for line in found for point in line.points for gain in (point.predicted, point.measured)]
    end = room([gain.median or 0.0 for gain in gains], [gain.high for gain in gains])
    batches = sorted({point.batch for line in found for point in line.points})
    layout = {
        **names,
        "xaxis": {
            "title": {"text": "sequences at once (log scale)"},
            "type": "log",
            "tickvals": batches,
            "ticktext": [str(batch) for batch in batches],
        },
        "yaxis": {"title": {"text": "decode speed-up (x)"}, "range": [0, end]},
        "shapes": [{"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": 1, "y1": 1, "line": {"color": "@muted"}}],
        "hovermode": "closest",
    }
    note = (
        f"Dashed: predicted, {speedup.FORMULA} Where every step drafts that is (1 - a^(g+1)) / ((1 - a)(g c + v)). "
        "Solid: measured, tokens a second that a decoding sequence gets, against the arm it builds on, in steps that "
        f"prefill nothing. Medians over the ok trials, {percent(report.confidence, 0)} intervals. It pays up to the "
        "batch where its line falls to 1, between two batches on logarithmic scales. Output tok/s counts prefill too."
    )
    return Chart("speculationgain", title, note, _table(report, found), traces, layout, height, wide=wide)


def _traces(index: int, line: Line, shift: float) -> list[dict[str, Any]]:
    colour = f"@arm{(index + 1) % 7}"
    looks = (("measured", "solid", "circle"), ("predicted", "dash", "diamond-open"))
    return [
        _trace(f"{label(line.name)} \u00b7 {kind}", kind, colour, dash, symbol, line.points, shift)
        for kind, dash, symbol in looks
    ]


def _trace(
    name: str, kind: str, colour: str, dash: str, symbol: str, points: Sequence[Point], shift: float
) -> dict[str, Any]:
    """``shift``: a factor on the batch, so that the intervals of several lines stand beside one another."""
    gains: list[Gain] = [getattr(point, kind) for point in points]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": floats([point.batch * shift for point in points]),
        "customdata": [point.batch for point in points],
        "y": floats([gain.median for gain in gains], 4),
        "line": {"color": colour, "dash": dash, "width": 1.6},
        "marker": {"color": colour, "symbol": symbol, "size": 8},
        "error_y": error_bars([gain.median for gain in gains], [(gain.low, gain.high) for gain in gains], colour),
        "meta": {"arms": [point.arm.index for point in points]},
        "hovertemplate": f"{name}: %{{y:.2f}}x at %{{customdata}}<extra></extra>",
    }


def _table(report: Report, found: Sequence[Line]) -> Table:
    rows = []
    for line in found:
        ends = [text_cell(line.break_even(kind)) for kind in ("predicted", "measured")]
        for point in line.points:
            arm = point.arm
            ratio = below_cell(arm, report.below(arm), HEADLINE)
            gains = [Cell(times(g.median, g.low, g.high), g.median) for g in (point.predicted, point.measured)]
            cells = [arm.cell(metric, text) for _, metric, text in speedup.FIGURES]
            rows.append([text_cell(arm.name), number_cell(point.batch, 0), *cells, *gains, ratio, *ends])
    columns = (
        *("arm", "batch", *(name for name, _, _ in speedup.FIGURES), "predicted", "measured", "output tok/s"),
        *("predicted to pay up to batch", "measured to pay up to batch"),
    )
    return Table(columns, rows)
