"""Precision: what fewer bytes of weights give in speed, and what they cost in quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.records import TrialRecord
from harness.report.data import Arm, Report
from harness.report.parts import Cell, Chart, Table, byte_size, floats, label, number, number_cell, percent, text_cell

QUALITY = ("equivalence", "top1_agreement", "kl_vs_bf16", "perplexity")


def precision_of(arm: Arm) -> str | None:
    name = (arm.config.get("precision") or {}).get("name")
    return None if name is None else str(name)


def families(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms whose settings agree in all but the precision, of which each family has at least two."""
    found: dict[tuple[str, ...], list[Arm]] = {}
    for arm in arms:
        settings = (str(setting) for setting in arm.plan.get("overrides") or ())
        others = tuple(setting for setting in settings if not setting.startswith(("precision=", "precision.")))
        if precision_of(arm) is not None:
            found.setdefault(others, []).append(arm)
    return [family for family in found.values() if len({precision_of(arm) for arm in family}) > 1]


def output_rate(trial: TrialRecord) -> float | None:
    rate: float | None = trial.run["metrics"].get("output_tokens_per_s")
    return rate


def chart(report: Report) -> Chart:
    title = "Precision: bytes of weights against speed"
    seen = [
        arm
        for family in families(report.arms)
        for arm in family
        if arm.metrics.get("weights_bytes") and arm.metrics.get("output_tokens_per_s")
    ]
    if not seen:
        nothing = "No two arms differ in their precision alone, each with a size and a speed."
        return Chart("precision", title, "", Table((), ()), empty=nothing)
    traces: list[dict[str, Any]] = []
    for arm in seen:
        megabytes = (arm.metrics["weights_bytes"] or 0) * 1e-6
        trials = list(arm.by_trial(output_rate).values())
        shared = {"type": "scatter", "legendgroup": str(arm.index), "name": label(arm.name), "cliponaxis": False}
        look = {"color": arm.colour, "symbol": f"{arm.marker}-open"}
        traces += [
            {
                **shared,
                "mode": "markers",
                "x": floats([megabytes] * len(trials), 2),
                "y": floats(trials),
                "marker": {**look, "size": 7},
                "opacity": 0.55,
                "hovertemplate": "%{fullData.name}, one trial<br>%{y:.1f} tok/s<extra></extra>",
            },
            {
                **shared,
                "mode": "markers+text",
                "x": floats([megabytes], 2),
                "y": floats([arm.metrics["output_tokens_per_s"]]),
                "text": [f"{label(precision_of(arm), 16)}{' (emulated)' if arm.emulated else ''}"],
                "textposition": "top center",
                "marker": {**look, "size": 12, **({} if arm.emulated else {"symbol": arm.marker})},
                "hovertemplate": "%{fullData.name}, median<br>%{y:.1f} tok/s with %{x:.0f} MB<extra></extra>",
            },
        ]
    highest = max(arm.metrics["output_tokens_per_s"] or 0 for arm in seen)
    largest = max(arm.metrics["weights_bytes"] or 0 for arm in seen) * 1e-6
    layout = {
        "xaxis": {"title": {"text": "resident weights (MB)"}, "range": [0, round(1.12 * largest, 3)]},
        "yaxis": {"title": {"text": "output of the machine (tok/s)"}, "range": [0, round(1.14 * highest, 3)]},
        "showlegend": False,
        "hovermode": "closest",
    }
    note = (
        "Arms that differ in their precision alone. Filled: median of the trials; open: each trial. Tables, the "
        "embedding and the head included. Precision changes what the model says: its quality stands in the table, as "
        "far as it was measured (equal output: requests whose every token is the reference's)."
    )
    if any(arm.emulated for arm in seen):
        note += f" Speed emulated, not to be compared: {', '.join(arm.name for arm in seen if arm.emulated)}."
    return Chart("precision", title, note, _table(seen), traces, layout, 380)


def _table(arms: Sequence[Arm]) -> Table:
    rows = []
    for arm in arms:
        m = arm.metrics
        cells = [
            text_cell(arm.name),
            text_cell(precision_of(arm)),
            Cell(byte_size(m["weights_bytes"]), m["weights_bytes"], (arm.name, "metrics", "weights_bytes")),
        ]
        shown = (
            ("output_tokens_per_s", number(m["output_tokens_per_s"], 1)),
            ("itl_s.p50", number(m.get("itl_s.p50"), 1, 1e3)),
            *((name, _quality(name, m.get(name))) for name in QUALITY),
        )
        cells += [Cell(text, m.get(name), (arm.name, "metrics", name) if name in m else ()) for name, text in shown]
        rows.append([*cells, number_cell(len(arm.ok), 0)])
    columns = ("arm", "precision", "weights", "output tok/s", "ITL p50 (ms)", "equal output", "top-1 agreement")
    return Table((*columns, "KL to bf16 (nat)", "perplexity", "trials (n)"), rows)


def _quality(name: str, value: float | None) -> str:
    return percent(value) if name in ("equivalence", "top1_agreement") else number(value, 4)
