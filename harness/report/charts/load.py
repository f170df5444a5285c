"""Latency and goodput against the arrival rate: up to which load the engine keeps its promises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records import TrialRecord
from harness.report.data import Arm, Report
from harness.report.intervals import INTERVAL_FROM, around, error_bars
from harness.report.parts import LEGEND_ABOVE, Chart, Table, fixed, floats, label, number_cell, percent, text_cell
from harness.summary import flatten

RATE = "workload.arrivals.rate"
OF_THE_LOAD = (f"{RATE}=", "workload.num_requests=")  # settings in which the arms of one line differ


@dataclass(frozen=True)
class Line:
    """One quantity in one panel; ``metric`` as in summary.json."""

    metric: str
    shown: str
    dash: str
    symbol: str


@dataclass(frozen=True)
class Panel:
    """``slo``: the config's name of the limit that is drawn, and how the line is called."""

    title: str
    axis: str
    unit: str
    scale: float
    lines: tuple[Line, ...]
    slo: tuple[str, str] | None = None


def _percentiles(metric: str) -> tuple[Line, ...]:
    looks = (("p50", "solid", "circle"), ("p90", "dash", "square"), ("p99", "dot", "diamond"))
    return tuple(Line(f"{metric}.{part}", part, dash, symbol) for part, dash, symbol in looks)


PANELS = (
    Panel("Time to first token", "TTFT", "s", 1.0, _percentiles("ttft_s"), ("ttft_s", "SLO on TTFT")),
    Panel("Inter-token latency", "ITL", "ms", 1e3, _percentiles("itl_s"), ("tpot_s", "SLO on TPOT")),
    Panel(
        "Requests served",
        "requests",
        "1/s",
        1.0,
        (
            Line("goodput_per_s", "good: every SLO met", "solid", "triangle-up"),
            Line("requests_per_s", "finished in the window", "dash", "cross"),
        ),
    ),
)


def offered_rate(arm: Arm) -> float | None:
    """Requests per second that the arm's arrivals are meant to bring; None of a closed loop or a burst."""
    workload = arm.config.get("workload")
    arrivals = workload.get("arrivals") if isinstance(workload, Mapping) else None
    rate = arrivals.get("rate") if isinstance(arrivals, Mapping) else None
    return float(rate) if isinstance(rate, int | float) and not isinstance(rate, bool) else None


def sweeps(report: Report) -> list[tuple[str, list[Arm]]]:
    """Name and arms, by rate, of each set of arms that differ in their load alone and have at least two rates."""
    found: dict[tuple[str, ...], list[Arm]] = {}
    for arm in report.arms:
        settings = tuple(s for s in map(str, arm.plan.get("overrides") or ()) if not s.startswith(OF_THE_LOAD))
        if arm.metrics and offered_rate(arm) is not None:
            found.setdefault(settings, []).append(arm)
    swept = {key: arms for key, arms in found.items() if len({offered_rate(arm) for arm in arms}) > 1}
    common = set.intersection(*(set(key) for key in swept)) if swept else set()
    return [
        (", ".join(s for s in key if s not in common), sorted(arms, key=lambda arm: offered_rate(arm) or 0.0))
        for key, arms in swept.items()
    ]


def values_of(trial: TrialRecord) -> dict[str, float | None]:
    """The trial's metrics that the panels show."""
    wanted = {line.metric for panel in PANELS for line in panel.lines}
    return {name: value for name, value in flatten(trial.run["metrics"]) if name in wanted}


def chart(report: Report) -> Chart:
    title = "Load: latency and goodput against the arrival rate"
    found = sweeps(report)
    if not found:
        nothing = "Needs arms that differ in their arrival rate alone: study=load."
        return Chart("load", title, "", Table((), ()), empty=nothing)
    arms = [arm for _, swept in found for arm in swept]
    traces: list[dict[str, Any]] = []
    for number_of, (name, swept) in enumerate(found):
        colour = f"@arm{(number_of + 1) % 7}"
        for index, panel in enumerate(PANELS):
            for line in panel.lines:
                traces += _line(name, swept, index, panel, line, colour, report.confidence)
    references = _references(arms)
    traces += references
    layout: dict[str, Any] = {"legend": LEGEND_ABOVE, "showlegend": True, "hovermode": "closest", "annotations": []}
    width = 0.28
    for index, panel in enumerate(PANELS):
        left = round(index * (1 - width) / (len(PANELS) - 1), 4)
        suffix = "" if index == 0 else str(index + 1)
        log = panel.slo is not None  # a queue that only grows is orders of magnitude above the SLO
        layout[f"xaxis{suffix}"] = {
            **{"domain": [left, round(left + width, 4)], "anchor": f"y{suffix}", "range": [0, _end(arms)]},
            "title": {"text": "arrivals offered (requests/s)"},
        }
        layout[f"yaxis{suffix}"] = {
            **{"anchor": f"x{suffix}", "domain": [0, 0.93]},
            **({"type": "log", "dtick": "D2"} if log else {"range": [0, _top(traces, f"y{suffix}")]}),
            "title": {"text": f"{panel.axis} ({panel.unit}{', log scale' if log else ''})"},
        }
        layout["annotations"].append(
            {
                **{"text": panel.title, "x": left, "y": 0.94, "xref": "paper", "yref": "paper", "showarrow": False},
                **{"xanchor": "left", "yanchor": "bottom"},
            }
        )
    layout["annotations"] += [_called(line) for line in references]
    note = (
        f"Large: median over the trials of each trial's figure, with a {percent(report.confidence, 0)} interval where "
        f"there are at least {INTERVAL_FROM}; small: each trial. Open loop: requests come when they are due, however "
        "many wait, so beyond saturation TTFT grows with the length of the run. Percentiles are over the requests due "
        "in the window; n is in the table. Between two rates nothing was measured. Grey: the SLO's limits, and as many "
        "requests as are offered. The SLO bounds each request's TPOT, its mean time per token, and not its gaps."
    )
    return Chart("load", title, note, _table(found), traces, layout, 430)


def _axes(index: int) -> dict[str, str]:
    suffix = "" if index == 0 else str(index + 1)
    return {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}


def _line(
    name: str, arms: Sequence[Arm], index: int, panel: Panel, line: Line, colour: str, confidence: float
) -> list[dict[str, Any]]:
    """The medians with their intervals, and every trial behind them."""
    shown = f"{label(name, 40)}: {line.shown}" if name else line.shown
    rates = [offered_rate(arm) for arm in arms]
    medians = [_scaled(arm.metrics.get(line.metric), panel.scale) for arm in arms]
    trials = [
        [v for t in arm.ok if (v := _scaled(values_of(t).get(line.metric), panel.scale)) is not None] for arm in arms
    ]
    bounds = [around(values, confidence) for values in trials]
    small = [(arm, rate, v) for arm, rate, values in zip(arms, rates, trials, strict=True) for v in values]
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": shown,
            "x": floats(rate for _, rate, _ in small),
            "y": floats(value for *_, value in small),
            "marker": {"symbol": f"{line.symbol}-open", "size": 5, "color": colour},
            "opacity": 0.5,
            "showlegend": False,
            "hoverinfo": "skip",
            "meta": {"points": [arm.index for arm, *_ in small]},
            **_axes(index),
        },
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": shown,
            "legendgroup": shown,
            "showlegend": index != 1,  # the percentiles look alike in both latency panels
            "x": floats(rates),
            "y": floats(medians),
            "error_y": error_bars(medians, bounds, colour),
            "line": {"color": colour, "dash": line.dash, "width": 2},
            "marker": {"symbol": line.symbol, "size": 9, "color": colour},
            "hovertemplate": f"%{{fullData.name}} %{{y:.4g}} {panel.unit} at %{{x}} requests/s<extra></extra>",
            "meta": {"points": [arm.index for arm in arms]},
            **_axes(index),
        },
    ]


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None or not math.isfinite(value) else value * scale


def _end(arms: Sequence[Arm]) -> float:
    return round(1.06 * max(offered_rate(arm) or 0.0 for arm in arms), 6)


def _top(traces: Sequence[dict[str, Any]], yaxis: str) -> float:
    """Above every point and what is offered. An interval of three rates near 0 may reach ten times as far."""
    points = [float(y) for trace in traces if trace["yaxis"] == yaxis for y in trace["y"] if y is not None]
    return round(1.15 * max(points), 6)


def _references(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """The SLO's limits, each once, and the line on which everything that is offered is good."""
    end = _end(arms)
    lines: list[dict[str, Any]] = []
    for index, panel in enumerate(PANELS):
        found = [("as many as offered", [0.0, end])]
        if panel.slo is not None:
            key, called = panel.slo
            limits = {limit for arm in arms if (limit := (arm.config.get("slo") or {}).get(key)) is not None}
            values = sorted(float(limit) * panel.scale for limit in limits if limit > 0)  # 0 is on no log axis
            found = [(f"{called}: {value:g} {panel.unit}", [value, value]) for value in values]
        lines += [
            {
                **{"type": "scatter", "mode": "lines", "name": text, "showlegend": False, **_axes(index)},
                **{"x": floats([0, end]), "y": floats(y), "hovertemplate": "%{fullData.name}<extra></extra>"},
                **{"line": {"color": "@muted", "width": 1.4, "dash": "longdash"}},
                "meta": {"arms": [arm.index for arm in arms]},
            }
            for text, y in found
        ]
    return lines


def _called(line: dict[str, Any]) -> dict[str, Any]:
    """A reference line's name at its right end; a log axis takes an annotation's place as a logarithm."""
    flat = line["y"][0] == line["y"][1]
    y = round(math.log10(line["y"][1]), 5) if flat else line["y"][1]
    return {
        **{"text": line["name"], "x": line["x"][1], "y": y, "xref": line["xaxis"], "yref": line["yaxis"]},
        **{"xanchor": "right", "yanchor": "bottom" if flat else "top", "showarrow": False, "font": {"color": "@soft"}},
    }


def _table(found: Sequence[tuple[str, Sequence[Arm]]]) -> Table:
    several = len(found) > 1
    rows = []
    for name, arms in found:
        for arm in arms:
            cells = [text_cell(arm.name), *([text_cell(name)] if several else []), number_cell(offered_rate(arm), 2)]
            for metric, digits, scale in _COLUMNS:
                cells.append(arm.cell(metric, fixed(digits, scale)))
            cells += [
                arm.cell("slo_attainment", percent),
                number_cell(arm.metrics.get("ttft_s.n"), 0),
                number_cell(arm.metrics.get("itl_s.n"), 0),
                number_cell(len(arm.ok), 0),
            ]
            rows.append(cells)
    columns = [f"{p.axis} {line.shown} ({p.unit})" for p in PANELS[:2] for line in p.lines]
    columns += ["good (1/s)", "finished (1/s)", "output tok/s", "SLO met", "requests a trial (n)", "gaps a trial (n)"]
    return Table(("arm", *(["settings"] if several else []), "offered (1/s)", *columns, "trials (n)"), rows)


_COLUMNS: tuple[tuple[str, int, float], ...] = (
    *((line.metric, 3 if panel.scale == 1 else 1, panel.scale) for panel in PANELS for line in panel.lines),
    ("output_tokens_per_s", 1, 1.0),
)
