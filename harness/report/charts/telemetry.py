"""What the machine did under the steps: CPU, memory, each GPU where there is one, and what it cost to look."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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

    @property
    def shape(self) -> str:
        """A step's figure holds until the next one's; a machine's changes between its samples."""
        return "hv" if self.source.startswith(STEPS) else "linear"

    def values(self, recorded: Floats) -> Floats:
        """As they are drawn: of throttling, 100 where the clocks were slowed, else 0."""
        return 100.0 * (slowing(recorded) != 0) if self.name == THROTTLE else recorded * self.scale

    def quantity(self, recorded: Floats) -> str:
        """For the table; of clocks with the reasons why they were held back."""
        seen = reasons_of(slowing(recorded)) if self.name == THROTTLE else ()
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.meaning}{unit}{': ' if seen else ''}{', '.join(seen)}"


THROTTLE = "throttle_reasons"
STEPS = "steps"  # the source of what is no sample; with a worker's name where a topology has several
OF_STEPS = (
    Series(rf"{STEPS}.*", "running", "sequences running", ""),
    Series(rf"{STEPS}.*", "waiting", "requests waiting", ""),
    Series(rf"{STEPS}.*", "query_rows", "rows that a step computes", ""),
)
SERIES = (  # in the order of the panels
    *OF_STEPS,
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
COLUMNS, COLUMN_GAP = 3, 0.05  # the gap, in which the next panel's tick labels stand, as a share of the figure
TITLE_PX, PANEL_PX, TICKS_PX, AXIS_PX, LEGEND_PX = 24, 120, 26, 46, 60


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
    layout, height = _grid([series for series, _ in panels], time_range(drawn))
    traces: list[dict[str, Any]] = []
    cells, named = [], set()
    shown = points = 0
    for index, (series, lines) in enumerate(panels):
        suffix = "" if index == 0 else str(index + 1)
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
                    "line": {"color": arm.colour, "dash": arm.dash, "width": 1.4, "shape": series.shape},
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
    note = (
        f"{which_trials(drawn, total)} All panels have one clock and one axis of time; the first ones are what the "
        f"steps did, from the start of each. {shown:,} of {points:,} steps and samples drawn, extremes kept."
    )
    costs = [(arm, cost) for arm, trial in drawn if (cost := _cost(trial)) is not None]
    if costs:
        note += f" Sampling itself took at most {number(max(share for _, (share, *_) in costs), 2)} % of a core."
        cells += [row for arm, cost in costs for row in _cost_rows(arm, cost)]
    table = Table(("arm", "source", "quantity", "mean", "maximum", "samples (n)"), cells)
    return Chart("telemetry", title, note, table, traces, layout, height, wide=True)


def _grid(panels: Sequence[Series], span: Sequence[float]) -> tuple[dict[str, Any], int]:
    """Layout and height in px: panels in rows of `COLUMNS`, each under its title and above its own ticks."""
    rows, columns = -(-len(panels) // COLUMNS), min(COLUMNS, len(panels))
    row_px = TITLE_PX + PANEL_PX + TICKS_PX
    inner = row_px * rows - TICKS_PX
    width = (1 - COLUMN_GAP * (columns - 1)) / columns
    layout: dict[str, Any] = {
        "margin": {"l": 58, "r": 14, "t": LEGEND_PX, "b": AXIS_PX},
        "showlegend": True,
        "legend": {**LEGEND_ABOVE, "y": 1},
        "hovermode": "closest",
        "annotations": [],
    }
    for index, series in enumerate(panels):
        suffix = "" if index == 0 else str(index + 1)
        row, column = divmod(index, COLUMNS)
        left, top = round(column * (width + COLUMN_GAP), 4), 1 - (row * row_px + TITLE_PX) / inner
        lowest = index + COLUMNS >= len(panels)
        layout[f"xaxis{suffix}"] = {
            **{"domain": [left, round(left + width, 4)], "anchor": f"y{suffix}", "range": list(span), "nticks": 7},
            **({"title": {"text": "time since the run's start (s)"}} if lowest else {}),
            "automargin": False,
        }
        layout[f"yaxis{suffix}"] = {
            **{"domain": [max(0.0, top - PANEL_PX / inner), top], "anchor": f"x{suffix}", "rangemode": "tozero"},
            **{"nticks": 4, "ticksuffix": f" {series.unit}".rstrip(), "automargin": False},
        }
        layout["annotations"].append(
            {
                **{"text": series.meaning, "x": left, "y": top, "xref": "paper", "yref": "paper", "showarrow": False},
                **{"xanchor": "left", "yanchor": "bottom"},
            }
        )
    return layout, inner + LEGEND_PX + AXIS_PX


def _samples(trial: TrialRecord) -> dict[str, dict[str, tuple[Floats, Floats]]]:
    """Times and values by quantity and source, in time; a field that a device never answered is not there."""
    known = trial.telemetry.dropna(subset=["t_s", "value", "source"]).sort_values("t_s", kind="stable")
    found: dict[str, dict[str, tuple[Floats, Floats]]] = {}
    for (name, source), samples in known.groupby(["name", "source"]):
        found.setdefault(str(name), {})[str(source)] = samples["t_s"].to_numpy(float), samples["value"].to_numpy(float)
    return found and _of_steps(trial) | found


def _of_steps(trial: TrialRecord) -> dict[str, dict[str, tuple[Floats, Floats]]]:
    """The same of `OF_STEPS`, of each worker by itself: their steps overlap."""
    found: dict[str, dict[str, tuple[Floats, Floats]]] = {series.name: {} for series in OF_STEPS}
    for worker, steps in trial.steps.groupby(trial.steps["worker"].fillna("")):
        for name, by_source in found.items():
            values = steps[name].to_numpy(float, na_value=np.nan)
            if not np.isnan(values).any():
                by_source[f"{STEPS} {worker}".strip()] = steps["start_s"].to_numpy(float), values
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
