"""The linear layers alone: what 8 bits gain in the product, and what they pay for quantising and rescaling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.report.against import name_cell, ratio_cell, ratio_to
from harness.report.bars import stacked_bars
from harness.report.data import Arm, Report, middle
from harness.report.parts import Chart, Table, label, number_cell, text_cell

STAGES = {"quantize_s": "quantise", "matmul_s": "product", "rescale_s": "rescale"}
WHOLE = "whole layers"
LOOKS = {
    "quantise": ("@phase4", "x"),
    "product": ("@phase2", ""),
    "rescale": ("@phase0", "/"),
    WHOLE: ("@muted", "-"),
}


def stage_by_trial(arm: Arm, rows: int, name: str) -> dict[int, float]:
    """Trial number -> seconds of one pass through all linear layers at so many rows, where it is recorded."""
    return arm.by_trial(
        lambda trial: next((e[name] for e in trial.run.get("linear_stages") or () if e["rows"] == rows), None)
    )


def row_counts(arms: Iterable[Arm]) -> list[int]:
    """At which numbers of rows any arm's layers were timed, ascending."""
    stages = (entry for arm in arms for trial in arm.ok for entry in trial.run.get("linear_stages") or ())
    return sorted({int(entry["rows"]) for entry in stages})


def quantity(rows: int) -> str:
    """What `apply_s` by trial is called where a reader compares arms."""
    return f"linear.{rows}"


def chart(report: Report) -> Chart:
    title = "Linear layers: product against quantise and rescale"
    counts = row_counts(report.arms)
    split = [arm for arm in report.arms if any(stage_by_trial(arm, rows, "matmul_s") for rows in counts)]
    if not split:
        nothing = "No ok trial timed the stages of quantised linear layers."
        return Chart("linear", title, "", Table((), ()), empty=nothing)
    compared = [report.below(arm) for arm in split]
    drawn = [arm for arm in report.arms if arm in split or arm in compared]
    bars = []
    for rows in counts:
        for arm in drawn:
            names = STAGES if arm in split else {"apply_s": WHOLE}
            seconds = {part: middle(stage_by_trial(arm, rows, name).values()) for name, part in names.items()}
            known = {part: 1e3 * value for part, value in seconds.items() if value is not None}
            if known:
                bars.append((f"{label(arm.name, 24)} \u00b7 {rows} row{'' if rows == 1 else 's'}", known))
    traces, layout, height = stacked_bars(LOOKS, bars, "one pass through all linear layers", "ms")
    note = (
        "Timed after each trial's window: all linear layers but the head, random activations, at as many rows (tokens "
        "of a step) as stand beside the arm's name. The stages are timed one after the other; a kernel that fuses them "
        "takes less than their sum, as the table's whole layers show. Medians over the ok trials, ratios paired by "
        "trial, to the arm it builds on or, if one is chosen above, to another baseline; none where an arm's "
        "arithmetic is emulated."
    )
    return Chart("linear", title, note, _table(report, counts), traces, layout, height)


def _table(report: Report, counts: list[int]) -> Table:
    table = []
    for arm in report.arms:
        below = report.below(arm)
        for rows in counts:
            whole = stage_by_trial(arm, rows, "apply_s")
            if not whole:
                continue
            stages = [middle(stage_by_trial(arm, rows, name).values()) for name in STAGES]
            cells: list[Any] = [text_cell(arm.name), number_cell(rows, 0)]
            cells += [number_cell(value, 2, 1e3) for value in (middle(whole.values()), *stages)]
            theirs = {} if below is None else stage_by_trial(below, rows, "apply_s")
            cells += [name_cell(below), ratio_cell(ratio_to(report, arm, below, whole, theirs), quantity(rows))]
            table.append(cells)
    columns = ("arm", "rows", f"{WHOLE} (ms)", *(f"{part} (ms)" for part in STAGES.values()), "ratio to", WHOLE)
    return Table(columns, table)
