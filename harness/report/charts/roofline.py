"""Prefill and decode steps under the machine's roof: is the arithmetic or the memory what a step waits for?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.report.data import DASHES, Arm, Report, middle
from harness.report.figures import step_columns
from harness.report.intervals import INTERVAL_FROM, Bounds, around, beside, error_bars
from harness.report.legends import legend
from harness.report.parts import (
    MISSING,
    Cell,
    Chart,
    Table,
    fixed,
    floats,
    label,
    number_cell,
    percent,
    percent_cell,
    text_cell,
)
from harness.report.sampling import extremes
from harness.report.work import COLUMNS, Work, pooled, step_work

SYMBOLS = {"prefill": "", "decode": "-open"}  # kind of step -> what its marker's name ends in
STEPS_A_KIND = 60


@dataclass(frozen=True)
class Roof:
    """FLOP/s and bytes/s that the machine reaches at best in an arm's arithmetic, and who says so."""

    flops_per_s: float
    bytes_per_s: float
    source: str

    def at(self, intensity: float) -> float:
        """FLOP/s that are possible at so many FLOPs a byte."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on the arithmetic is the limit."""
        return self.flops_per_s / self.bytes_per_s


def roof(arm: Arm) -> Roof | None:
    """Medians of its ok trials' limits; None if either is unknown."""
    limits = [trial.run["limits"] or {} for trial in arm.ok]
    flops, moved = (middle(v for each in limits if (v := each.get(f"{n}_per_s"))) for n in ("flops", "bytes"))
    source = next((str(each["source"]) for each in limits if each.get("source")), "unknown")
    return None if flops is None or moved is None else Roof(flops, moved, source)


def chart(report: Report) -> Chart:
    title = "Roofline: prefill and decode steps under the machine's roof"
    counted = [arm for arm in report.arms if not arm.emulated]
    found = {arm.index: work for arm in counted if (work := work_of(arm))}
    seen = [arm for arm in counted if arm.index in found]
    if not seen:
        nothing = "No ok trial at a speed of its own recorded the FLOPs and bytes of its steps."
        return Chart("roofline", title, "", Table((), ()), empty=nothing)
    roofs = {arm.index: known for arm in seen if (known := roof(arm)) is not None}
    limit = report.points(STEPS_A_KIND, 10)
    traces = [trace for arm in seen for trace in _points(arm, found[arm.index], report.confidence, limit)]
    works = [work for by_kind in found.values() for work in by_kind.values()]
    start, end = min(work.least for work in works) / 1.5, max(work.most for work in works) * 1.5
    traces += _roof_lines([arm for arm in seen if arm.index in roofs], roofs, start, end)
    names, height, wide = legend(sum(trace.get("showlegend", True) for trace in traces), 420)
    layout = {
        **names,
        "xaxis": {"type": "log", "dtick": "D2", "title": {"text": "FLOP per byte moved (FLOP/B, log scale)"}},
        "yaxis": {"type": "log", "dtick": "D2", "title": {"text": "GFLOP/s (log scale)"}},
        "hovermode": "closest",
    }
    steps = sum(work.steps for work in works)
    small = sum(len(trace["x"]) for trace in traces if "opacity" in trace)
    note = (
        f"Large: all steps of a kind together, over the ok trials, with {percent(report.confidence, 0)} intervals of "
        f"what each trial gave where there are at least {INTERVAL_FROM}; small: single steps of one trial. Filled: "
        "steps that prefill anything; open: steps that only decode. Time is the whole step's; bytes are the least that "
        f"it must move (weights, K/V), so a point lies rather too far right. {small:,} of {steps:,} steps drawn, "
        "extremes kept."
    )
    left_out = [arm.name for arm in report.arms if arm.emulated]
    if left_out:
        note += f" Speed emulated, so not drawn: {', '.join(left_out)}."
    if not roofs:
        note += " No roof: these records do not say what the machine could do."
    return Chart(
        "roofline", title, note, _table(seen, found, roofs, report.confidence), traces, layout, height, wide=wide
    )


def work_of(arm: Arm) -> dict[str, Work]:
    """By kind, of the steps of all its ok trials."""
    return pooled(trial.work for trial in arm.figures.trials)


def _bounds(arm: Arm, kind: str, confidence: float) -> tuple[Bounds, Bounds]:
    """Of FLOP per byte and of GFLOP/s, over the ok trials that have such steps."""
    works = [trial.work[kind] for trial in arm.figures.trials if kind in trial.work]
    rates = [work.flops_per_s * 1e-9 for work in works]
    return around([work.intensity for work in works], confidence), around(rates, confidence)


def _points(arm: Arm, works: Mapping[str, Work], confidence: float, limit: int) -> list[dict[str, Any]]:
    shown = step_work(step_columns(arm.ok[0], COLUMNS))
    traces: list[dict[str, Any]] = []
    for kind, work in works.items():
        shared = {"type": "scatter", "mode": "markers", "legendgroup": str(arm.index), "name": label(arm.name, 32)}
        symbol = arm.marker + SYMBOLS[kind]
        if kind in shown:
            flops, moved, seconds = shown[kind].flops, shown[kind].bytes, shown[kind].seconds
            kept = extremes([flops / seconds], limit)
            traces.append(
                {
                    **shared,
                    "x": floats((flops / moved)[kept], 3),
                    "y": floats((flops / seconds)[kept] * 1e-9, 4),
                    "marker": {"symbol": symbol, "size": 5, "color": arm.colour},
                    "opacity": 0.35,
                    "showlegend": False,
                    "hoverinfo": "skip",
                }
            )
        intensity, rate = _bounds(arm, kind, confidence)
        traces.append(
            {
                **shared,
                "x": floats([work.intensity]),
                "y": floats([work.flops_per_s * 1e-9]),
                "error_x": error_bars([work.intensity], [intensity], arm.colour),
                "error_y": error_bars([work.flops_per_s * 1e-9], [rate], arm.colour),
                "marker": {
                    "symbol": symbol,
                    "size": 13,
                    "color": arm.colour,
                    "line": {"width": 2, "color": arm.colour},
                },
                "showlegend": kind == next(iter(works)),
                "hovertemplate": f"%{{fullData.name}}, {kind}<br>%{{y:.3g}} GFLOP/s, %{{x:.3g}} FLOP/B<extra></extra>",
            }
        )
    return traces


def _roof_lines(arms: list[Arm], roofs: Mapping[int, Roof], start: float, end: float) -> list[dict[str, Any]]:
    """A line for each roof that is not another one's, with the precisions under it."""
    by_roof: dict[Roof, list[Arm]] = {}
    for arm in arms:
        by_roof.setdefault(roofs[arm.index], []).append(arm)
    lines: list[dict[str, Any]] = []
    for found, under in by_roof.items():
        names = list(dict.fromkeys(str((arm.config.get("precision") or {}).get("name") or arm.name) for arm in under))
        points = sorted({start, min(max(found.ridge, start), end), end})
        text = label(f"{found.flops_per_s * 1e-9:,.0f} GFLOP/s, {found.source}: {', '.join(names)}", 48)
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": text,
                "x": floats(points, 4),
                "y": floats([found.at(point) * 1e-9 for point in points], 4),
                "line": {"color": "@muted", "width": 1.6, "dash": DASHES[len(lines) % len(DASHES)]},
                "meta": {"arms": [arm.index for arm in under]},
                "hovertemplate": f"%{{fullData.name}}<br>{found.bytes_per_s * 1e-9:,.1f} GB/s<extra></extra>",
            }
        )
    return lines


def _table(
    arms: list[Arm], found: Mapping[int, Mapping[str, Work]], roofs: Mapping[int, Roof], confidence: float
) -> Table:
    rows = []
    for arm in arms:
        known = roofs.get(arm.index)
        for kind, work in found[arm.index].items():
            at = None if known is None else known.at(work.intensity)
            intensity, rate = _bounds(arm, kind, confidence)
            bound = "" if known is None else "arithmetic" if work.intensity > known.ridge else "memory"
            rows.append(
                [
                    text_cell(arm.name),
                    text_cell(kind),
                    number_cell(work.steps, 0),
                    beside(number_cell(work.intensity, 2), intensity, fixed(2)),
                    beside(number_cell(work.flops_per_s, 2, 1e-9), rate, fixed(2)),
                    number_cell(work.flops_per_s / work.intensity, 2, 1e-9),
                    Cell(MISSING) if at is None else number_cell(at, 1, 1e-9),
                    Cell(MISSING) if at is None else percent_cell(work.flops_per_s / at),
                    text_cell(bound),
                ]
            )
    columns = ("arm", "steps", "steps (n)", "FLOP/B", "GFLOP/s", "GB/s", "roof there (GFLOP/s)", "of the roof")
    return Table((*columns, "bound by"), rows)
