"""What the machine did meanwhile: CPU, memory, each GPU where there is one, and what it cost to look."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.records import TrialRecord
from harness.report.data import Arm, Report
from harness.report.panels import panel_arms, time_range, which_trials
from harness.report.parts import LEGEND_ABOVE, Cell, Chart, Table, floats, label, number, number_cell, text_cell
from harness.report.sampling import extremes
from harness.validity import reasons_of, slowing

Floats = npt.NDArray[np.float64]


class Series(NamedTuple):
    """What is drawn in a panel of its own; ``source``: a pattern, ``scale``: from the recorded unit to ``unit``."""

    source: str
    name: str
    meaning: str
    unit: str
    scale: float = 1.0

    def values(self, recorded: Floats) -> Floats:
        return 100.0 * (slowing(recorded) != 0) if self.name == THROTTLE else recorded * self.scale

    def quantity(self, recorded: Floats) -> str:
        """For the table; of clocks with the reasons why they were held back."""
        seen = reasons_of(slowing(recorded)) if self.name == THROTTLE else ()
        return f"{self.meaning} ({self.unit}){': ' if seen else ''}{', '.join(seen)}"


THROTTLE = "throttle_reasons"
SERIES = (  # in the order of the panels
    Series(r"process", "cpu_percent", "CPU of the process (100 % is one core)", "%"),
    Series(r"host", "cpu_percent", "CPU of the host (100 % is every core)", "%"),
    Series(r"process", "resident_bytes", "resident memory of the process", "GB", 1e-9),
    Series(r"gpu\d+", "utilization_percent", "GPU busy", "%"),
    Series(r"gpu\d+", "sm_active_percent", "SMs active", "%"),
    Series(r"gpu\d+", "tensor_active_percent", "tensor cores active", "%"),
    Series(r"gpu\d+", "dram_active_percent", "DRAM bandwidth in use", "%"),
    Series(r"gpu\d+", "memory_used_bytes", "GPU memory", "GB", 1e-9),
    Series(r"gpu\d+", "pcie_sent_bytes_per_s", "PCIe, sent by the GPU", "GB/s", 1e-9),
    Series(r"gpu\d+", "pcie_received_bytes_per_s", "PCIe, received by the GPU", "GB/s", 1e-9),
    Series(r"gpu\d+", "power_w", "GPU power", "W"),
    Series(r"gpu\d+", "sm_clock_hz", "SM clock", "GHz", 1e-9),
    Series(r"gpu\d+", THROTTLE, "GPU clocks held back (100 % is yes)", "%"),
    Series(r"gpu\d+", "temperature_c", "GPU temperature", "°C"),
)
POINTS_A_LINE = 200
PANEL_PX = 150


def chart(report: Report) -> Chart:
    title = "Telemetry: what the machine did meanwhile"
    drawn, total = panel_arms(report)
    seen = [(arm, _samples(trial)) for arm, trial in drawn]
    panels = []
    for series in SERIES:
        lines = [
            (arm, source, line)
            for arm, found in seen
            for source, line in found.get(series.name, {}).items()
            if re.fullmatch(series.source, source)
        ]
        if lines:
            panels.append((series, lines))
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
    for index, (series, lines) in enumerate(panels):
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
            **{"nticks": 4, "ticksuffix": f" {series.unit}"},
        }
        layout["annotations"].append(
            {
                **{"text": series.meaning, "x": left, "y": top, "xref": "paper", "yref": "paper", "showarrow": False},
                **{"xanchor": "left", "yanchor": "bottom"},
            }
        )
        for arm, source, (times, recorded) in lines:
            values = series.values(recorded)
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
                    "hovertemplate": f"%{{y:.3g}} {series.unit} at %{{x:.2f}} s<extra>%{{fullData.name}}</extra>",
                }
            )
            named.add(arm.name)
            digits = 2 if series.scale < 1 else 1
            cells.append(
                [
                    text_cell(arm.name),
                    text_cell(source),
                    text_cell(series.quantity(recorded)),
                    number_cell(float(np.nanmean(values)), digits),
                    number_cell(float(np.nanmax(values)), digits),
                    number_cell(len(values), 0),
                ]
            )
    note = f"{which_trials(drawn, total)} {shown:,} of {points:,} samples drawn, extremes kept."
    costs = [(arm, cost) for arm, trial in drawn if (cost := _cost(trial)) is not None]
    if costs:
        note += f" Sampling itself took at most {number(max(share for _, (share, *_) in costs), 2)} % of a core."
        cells += [row for arm, cost in costs for row in _cost_rows(arm, cost)]
    table = Table(("arm", "source", "quantity", "mean", "maximum", "samples (n)"), cells)
    return Chart("telemetry", title, note, table, traces, layout, 90 + PANEL_PX * rows)


def _samples(trial: TrialRecord) -> dict[str, dict[str, tuple[Floats, Floats]]]:
    """Times and values by quantity and source, in time; a field that a device never answered is not there."""
    known = trial.telemetry.dropna(subset=["t_s", "value", "source"]).sort_values("t_s", kind="stable")
    found: dict[str, dict[str, tuple[Floats, Floats]]] = {}
    for (name, source), samples in known.groupby(["name", "source"]):
        found.setdefault(str(name), {})[str(source)] = samples["t_s"].to_numpy(float), samples["value"].to_numpy(float)
    return found


# --- what it cost to look ---------------------------------------------------------------------------------------------

Cost = tuple[float, float, float, int]  # CPU time in % of a core, mean and longest round in ms, rounds


def _cost(trial: TrialRecord) -> Cost | None:
    """Of a trial's sampling; None where that is not recorded."""
    told: Mapping[str, Any] = trial.run["provenance"].get("telemetry_cost") or {}
    times = trial.telemetry["t_s"].dropna()
    spanned_s = float(times.max() - times.min())
    if not told.get("rounds") or not spanned_s > 0:
        return None
    return 100 * told["cpu_s"] / spanned_s, 1e3 * told["mean_round_s"], 1e3 * told["max_round_s"], told["rounds"]


def _cost_rows(arm: Arm, cost: Cost) -> list[list[Cell]]:
    share, mean_ms, longest_ms, rounds = cost

    def row(what: str, mean: float, longest: float | None) -> list[Cell]:
        named = [text_cell(text) for text in (arm.name, "sampling", what)]
        return [*named, number_cell(mean, 2), number_cell(longest, 2), number_cell(rounds, 0)]

    return [row("its own CPU time (% of a core)", share, None), row("length of a round (ms)", mean_ms, longest_ms)]
