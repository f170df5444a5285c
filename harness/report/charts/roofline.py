"""Prefill and decode steps under the machine's roof: is the arithmetic or the memory what a step waits for?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.records import TrialRecord
from harness.report.data import Arm, Report, middle
from harness.report.figures import step_columns
from harness.report.parts import (
    LEGEND_ABOVE,
    MISSING,
    Cell,
    Chart,
    Table,
    floats,
    label,
    number_cell,
    percent_cell,
    text_cell,
)
from harness.report.sampling import extremes

Floats = npt.NDArray[np.float64]

KINDS = {"prefill": "", "decode": "-open"}  # kind of step -> what its marker's name ends in
FIELDS = ("flops", "bytes", "seconds")
STEPS_A_KIND = 60
LABELLED_ROOFS = 4


@dataclass(frozen=True)
class StepWork:
    """FLOPs, bytes moved and seconds, a value a step."""

    flops: Floats
    bytes: Floats
    seconds: Floats

    @property
    def intensity(self) -> float:
        """FLOP per byte over all steps."""
        return float(self.flops.sum() / self.bytes.sum())

    @property
    def flops_per_s(self) -> float:
        return float(self.flops.sum() / self.seconds.sum())


@dataclass(frozen=True)
class Roof:
    """FLOP/s and bytes/s that the machine reaches at best in an arm's arithmetic, and who says so."""

    flops_per_s: float
    bytes_per_s: float
    source: str

    def at(self, intensity: float) -> float:
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on the arithmetic is the limit."""
        return self.flops_per_s / self.bytes_per_s


def step_work(trial: TrialRecord) -> dict[str, StepWork]:
    """Of the steps whose FLOPs and bytes are known: those that prefill anything, and those that only decode."""
    steps = step_columns(trial, ("prefill_tokens", "decode_tokens", "flops", "bytes", "start_s", "end_s"))
    prefill, decode = steps["prefill_tokens"], steps["decode_tokens"]
    flops, moved = steps["flops"], steps["bytes"]
    seconds = steps["end_s"] - steps["start_s"]
    known = (flops > 0) & (moved > 0) & (seconds > 0)
    kinds = {"prefill": known & (prefill > 0), "decode": known & (prefill == 0) & (decode > 0)}
    return {kind: StepWork(flops[of], moved[of], seconds[of]) for kind, of in kinds.items() if of.any()}


def pooled(trials: Iterable[TrialRecord]) -> dict[str, StepWork]:
    """All trials' steps, by kind."""
    found = [step_work(trial) for trial in trials]
    return {
        kind: StepWork(*(np.concatenate([getattr(work[kind], f) for work in having]) for f in FIELDS))
        for kind in KINDS
        if (having := [work for work in found if kind in work])
    }


def roof(arm: Arm) -> Roof | None:
    """Medians of its ok trials' limits; None if either is unknown."""
    limits = [trial.run["limits"] or {} for trial in arm.ok]
    flops, moved = (middle(v for each in limits if (v := each.get(f"{n}_per_s"))) for n in ("flops", "bytes"))
    source = next((str(each["source"]) for each in limits if each.get("source")), "unknown")
    return None if flops is None or moved is None else Roof(flops, moved, source)


def chart(report: Report) -> Chart:
    title = "Roofline: prefill and decode steps under the machine's roof"
    counted = [arm for arm in report.arms if not arm.emulated]
    found = {arm.index: work for arm in counted if (work := pooled(arm.ok))}
    seen = [arm for arm in counted if arm.index in found]
    if not seen:
        nothing = "No ok trial at a speed of its own recorded the FLOPs and bytes of its steps."
        return Chart("roofline", title, "", Table((), ()), empty=nothing)
    roofs = {arm.index: known for arm in seen if (known := roof(arm)) is not None}
    limit = report.points(STEPS_A_KIND, 10)
    traces = [trace for arm in seen for trace in _points(arm, found[arm.index], limit)]
    spread = [work.flops / work.bytes for works in found.values() for work in works.values()]
    reach = [*(float(values.min()) for values in spread), *(float(values.max()) for values in spread)]
    traces += _roof_lines([arm for arm in seen if arm.index in roofs], roofs, min(reach) / 1.5, max(reach) * 1.5)
    layout = {
        "xaxis": {"type": "log", "dtick": "D2", "title": {"text": "FLOP per byte moved (FLOP/B, log scale)"}},
        "yaxis": {"type": "log", "dtick": "D2", "title": {"text": "GFLOP/s (log scale)"}},
        "legend": LEGEND_ABOVE,
        "showlegend": True,
        "hovermode": "closest",
    }
    steps = sum(len(work.flops) for works in found.values() for work in works.values())
    small = sum(len(trace["x"]) for trace in traces if "opacity" in trace)
    note = (
        "Large: all steps of a kind together, over the ok trials; small: single steps of one trial. Filled: steps that "
        "prefill anything; open: steps that only decode. Time is the whole step's; bytes are the least that it must "
        f"move (weights, K/V), so a point lies rather too far right. {small:,} of {steps:,} steps drawn, extremes kept."
    )
    left_out = [arm.name for arm in report.arms if arm.emulated]
    if left_out:
        note += f" Speed emulated, so not drawn: {', '.join(left_out)}."
    if not roofs:
        note += " No roof: these records do not say what the machine could do."
    return Chart("roofline", title, note, _table(seen, found, roofs), traces, layout, 420)


def _points(arm: Arm, works: Mapping[str, StepWork], limit: int) -> list[dict[str, Any]]:
    shown = step_work(arm.ok[0])
    traces: list[dict[str, Any]] = []
    for kind, work in works.items():
        shared = {"type": "scatter", "mode": "markers", "legendgroup": str(arm.index), "name": label(arm.name, 32)}
        symbol = arm.marker + KINDS[kind]
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
        traces.append(
            {
                **shared,
                "x": floats([work.intensity]),
                "y": floats([work.flops_per_s * 1e-9]),
                "marker": {"symbol": symbol, "size": 13, "color": arm.colour, "line": {"width": 2}},
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
    lines = []
    for found, under in by_roof.items():
        names = list(dict.fromkeys(str((arm.config.get("precision") or {}).get("name") or arm.name) for arm in under))
        points = sorted({start, min(max(found.ridge, start), end), end})
        text = label(f"{', '.join(names)}: {found.flops_per_s * 1e-9:,.0f} GFLOP/s, {found.source}", 48)
        labels = [""] * (len(points) - 1) + [text]
        lines.append(
            {
                "type": "scatter",
                "mode": "lines+text" if len(by_roof) <= LABELLED_ROOFS else "lines",
                "name": text,
                "x": floats(points, 4),
                "y": floats([found.at(point) * 1e-9 for point in points], 4),
                "text": labels,
                "textposition": "top left",
                "cliponaxis": False,
                "line": {"color": "@muted", "width": 1.6},
                "showlegend": False,
                "meta": {"arms": [arm.index for arm in under]},
                "hovertemplate": f"%{{fullData.name}}<br>{found.bytes_per_s * 1e-9:,.1f} GB/s<extra></extra>",
            }
        )
    return lines


def _table(arms: list[Arm], found: Mapping[int, Mapping[str, StepWork]], roofs: Mapping[int, Roof]) -> Table:
    rows = []
    for arm in arms:
        known = roofs.get(arm.index)
        for kind, work in found[arm.index].items():
            at = None if known is None else known.at(work.intensity)
            bound = "" if known is None else "arithmetic" if work.intensity > known.ridge else "memory"
            rows.append(
                [
                    text_cell(arm.name),
                    text_cell(kind),
                    number_cell(len(work.flops), 0),
                    number_cell(work.intensity, 2),
                    number_cell(work.flops_per_s, 2, 1e-9),
                    number_cell(work.flops_per_s / work.intensity, 2, 1e-9),
                    Cell(MISSING) if at is None else number_cell(at, 1, 1e-9),
                    Cell(MISSING) if at is None else percent_cell(work.flops_per_s / at),
                    text_cell(bound),
                ]
            )
    columns = ("arm", "steps", "steps (n)", "FLOP/B", "GFLOP/s", "GB/s", "roof there (GFLOP/s)", "of the roof")
    return Table((*columns, "bound by"), rows)
