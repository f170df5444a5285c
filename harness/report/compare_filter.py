"""Whose is what in a figure, so that the page can leave out the arms that a reader has filtered out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.report.bars import ROW_PX
from harness.report.data import Arm
from harness.report.parts import Chart, label

LABEL_LENGTHS = (24, 28, 32, 40, 60)  # to which charts shorten an arm's name

# Names shortened alike belong to every arm that they may stand for: hidden only if all of these are.
Owners = Mapping[str, list[int]]


def tagged(chart: Chart, arms: Sequence[Arm]) -> Chart:
    """The same chart with indices of arms under `meta`, which Plotly leaves alone.

    A trace's `meta.arms`; the layout's `meta.rows` of a chart with a row an arm, `meta.panels` of one with a panel an
    arm, and `meta.arrows`: for each annotation the arms at its two ends. A trace may bring its own `meta`.
    """
    owners = _owners(arms)
    traces = [
        {**trace, "meta": {"arms": found}} if "meta" not in trace and (found := _of_trace(trace, owners)) else trace
        for trace in chart.traces
    ]
    annotations: Sequence[dict[str, Any]] = chart.layout.get("annotations") or ()
    rows = chart.layout.get("yaxis", {}).get("ticktext") or ()
    meta: dict[str, Any] = {}
    if rows:
        meta |= {"rows": [_of_row(text, owners) for text in rows], "row_px": ROW_PX}
    if annotations and all(note["text"].startswith("<b>") for note in annotations):
        meta["panels"] = [owners.get(note["text"][3:].partition("</b>")[0]) for note in annotations]
    if any("ax" in note for note in annotations):
        meta["arrows"] = [_ends(note, traces) for note in annotations]
    return replace(chart, traces=traces, layout={**chart.layout, "meta": meta} if meta else chart.layout)


def _owners(arms: Sequence[Arm]) -> Owners:
    found: dict[str, list[int]] = defaultdict(list)
    for arm in arms:
        for text in {label(arm.name, length) for length in LABEL_LENGTHS}:
            found[text].append(arm.index)
    return found


def _of_trace(trace: Mapping[str, Any], owners: Owners) -> list[int] | None:
    """By its legend group, an arm's index, or by a name that ends in how many values it has."""
    group = str(trace.get("legendgroup", ""))
    if group.isdigit():
        return [int(group)]
    return owners.get(str(trace.get("name", "")).rpartition(" (n ")[0])


def _of_row(text: str, owners: Owners) -> list[int] | None:
    return owners.get(text) or owners.get(text.rpartition(" \u00b7 ")[0])


def _ends(note: Mapping[str, Any], traces: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The arms whose point lies where an arrow begins or ends."""
    ends = [(round(note[x], 5), round(note[y], 5)) for x, y in (("x", "y"), ("ax", "ay"))]
    points = [((t["x"][0], t["y"][0]), t["meta"]["arms"]) for t in traces if "meta" in t and len(t["x"]) == 1]
    return [[arm for point, arms in points if point == end for arm in arms] for end in ends]
