"""What the machine did meanwhile: CPU, memory, and each GPU where there is one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.records import TrialRecord
from harness.report.data import Report
from harness.report.panels import panel_arms, time_range, which_trials
from harness.report.parts import LEGEND_ABOVE, Chart, Table, floats, label, number_cell, text_cell
from harness.report.sampling import extremes

Floats = npt.NDArray[np.float64]

# (source, name) -> panel title, unit, scale; in the order of the panels.
SERIES = (
    (r"process", "cpu_percent", "CPU of the process (100 % is one core)", "%", 1.0),
    (r"host", "cpu_percent", "CPU of the host (100 % is every core)", "%", 1.0),
    (r"process", "resident_bytes", "resident memory of the process", "GB", 1e-9),
    (r"gpu\d+", "utilization_percent", "GPU busy", "%", 1.0),
    (r"gpu\d+", "sm_active_percent", "SMs active", "%", 1.0),
    (r"gpu\d+", "tensor_active_percent", "tensor cores active", "%", 1.0),
    (r"gpu\d+", "dram_active_percent", "DRAM bandwidth in use", "%", 1.0),
    (r"gpu\d+", "memory_used_bytes", "GPU memory", "GB", 1e-9),
    (r"gpu\d+", "power_w", "GPU power", "W", 1.0),
    (r"gpu\d+", "sm_clock_hz", "SM clock", "GHz", 1e-9),
    (r"gpu\d+", "temperature_c", "GPU temperature", "°C", 1.0),
)
POINTS_A_LINE = 200
PANEL_PX = 150


def chart(report: Report) -> Chart:
    title = "Telemetry: what the machine did meanwhile"
    drawn, total = panel_arms(report)
    seen = [(arm, _samples(trial)) for arm, trial in drawn]
    panels = []
    for pattern, name, meaning, unit, scale in SERIES:
        lines = [
            (arm, source, line)
            for arm, found in seen
            for source, line in found.get(name, {}).items()
            if re.fullmatch(pattern, source)
        ]
        if lines:
            panels.append((lines, meaning, unit, scale))
    if not panels:
        return Chart("telemetry", title, "", Table((), ()), empty="No telemetry was recorded.")
    span = time_range(drawn)
    rows = -(-len(panels) // 2)
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "showlegend": True,
        "legend": LEGEND_ABOVE,
        "hovermode": "closest",
        "annotations": [],
    }
    cells, named = [], set()
    shown = points = 0
    for index, (lines, meaning, unit, scale) in enumerate(panels):
        suffix = "" if index == 0 else str(index + 1)
        row, column = divmod(index, 2)
        top = 1 - (row + 0.16) / rows
        left = 0.54 * column
        layout[f"xaxis{suffix}"] = {
            **{"domain": [left, left + 0.46], "anchor": f"y{suffix}", "range": span, "nticks": 6},
            **({"title": {"text": "time (s)"}} if index >= len(panels) - 2 else {}),
        }
        layout[f"yaxis{suffix}"] = {
            **{"domain": [max(0.0, 1 - (row + 0.92) / rows), top], "anchor": f"x{suffix}", "rangemode": "tozero"},
            **{"nticks": 4, "ticksuffix": f" {unit}"},
        }
        layout["annotations"].append(
            {
                **{"text": meaning, "x": left, "y": top, "xref": "paper", "yref": "paper", "showarrow": False},
                **{"xanchor": "left", "yanchor": "bottom"},
            }
        )
        for arm, source, (times, recorded) in lines:
            values = recorded * scale
            kept = extremes([values], report.points(POINTS_A_LINE))
            shown, points = shown + len(kept), points + len(values)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": label(arm.name, 32),
                    "legendgroup": str(arm.index),
                    "showlegend": arm.name not in named,
                    "x": floats(times[kept], 3),
                    "y": floats(values[kept], 3),
                    "line": {"color": arm.colour, "dash": arm.dash, "width": 1.4},
                    "xaxis": f"x{suffix}",
                    "yaxis": f"y{suffix}",
                    "hovertemplate": f"%{{y:.3g}} {unit} at %{{x:.2f}} s<extra>%{{fullData.name}}</extra>",
                }
            )
            named.add(arm.name)
            digits = 2 if scale < 1 else 1
            cells.append(
                [
                    text_cell(arm.name),
                    text_cell(source),
                    text_cell(f"{meaning} ({unit})"),
                    number_cell(float(np.nanmean(values)), digits),
                    number_cell(float(np.nanmax(values)), digits),
                    number_cell(len(values), 0),
                ]
            )
    note = f"{which_trials(drawn, total)} {shown:,} of {points:,} samples drawn, extremes kept."
    table = Table(("arm", "source", "quantity", "mean", "maximum", "samples (n)"), cells)
    return Chart("telemetry", title, note, table, traces, layout, 90 + PANEL_PX * rows)


def _samples(trial: TrialRecord) -> dict[str, dict[str, tuple[Floats, Floats]]]:
    """Times and values by quantity and source, in time; a field that a device never answered is not there."""
    known = trial.telemetry.dropna(subset=["t_s", "value", "source"]).sort_values("t_s", kind="stable")
    found: dict[str, dict[str, tuple[Floats, Floats]]] = {}
    for (name, source), samples in known.groupby(["name", "source"]):
        found.setdefault(str(name), {})[str(source)] = samples["t_s"].to_numpy(float), samples["value"].to_numpy(float)
    return found
