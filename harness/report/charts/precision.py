"""Fewer bytes for weights or for keys and values: what they give in speed, and what they cost in quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from harness.records import TrialRecord
from harness.report.data import Arm, Report
from harness.report.equal_burst import median_rates
from harness.report.intervals import INTERVAL_FROM, around, beside, error_bars, room
from harness.report.legends import legend
from harness.report.parts import Cell, Chart, Table, byte_size, fixed, floats, label, number_cell, percent, text_cell
from harness.report.placing import Named, placed
from harness.report.quality import DRAWN, EQUAL_OUTPUT, Quality
from harness.statistics import CONFIDENCE

SPEED = "output_tokens_per_s"
OF_THE_WEIGHTS = ("weights_bytes", "checkpoint_bytes")  # in memory, and on disk what they were made from
LABELLED_ARMS = 12  # more are named in a legend
PANEL_WIDTH_PX = 570.0  # of half a page
PANEL_PX, QUALITY_PX, GAP_PX, MARGIN = 260, 120, 26, {"l": 58, "r": 14, "t": 24, "b": 46}


@dataclass(frozen=True)
class Kept:
    """Something that is kept in numbers of some kind, an option of ``group``; ``size`` of it in bytes."""

    key: str
    group: str
    what: str
    size: Callable[[Arm], float | None]
    unit: str
    scale: float
    note: str


def weights_bytes(arm: Arm) -> float | None:
    return arm.metrics.get("weights_bytes")


def kv_bytes_a_token(arm: Arm) -> float | None:
    """The budget over the positions that it holds."""
    budget = (arm.config.get("kv_cache") or {}).get("budget_bytes")
    if arm.shown is None or not isinstance(budget, int | float):
        return None
    capacity = max(filter(None, arm.shown.table("steps", ("kv_capacity_tokens",))[0].to_pylist()), default=None)
    return None if capacity is None else budget / capacity


WEIGHTS = Kept(
    *("precision", "precision", "weights", weights_bytes, "MB", 1e-6),
    note="Weights: as they are resident, with tables, embedding and head; on disk: the files they are made from.",
)
KEYS_AND_VALUES = Kept(
    *("kvdtype", "kv_dtype", "K/V of a token", kv_bytes_a_token, "kB", 1e-3),
    note="K/V of a token: the cache's budget over the positions that it holds.",
)


def option(arm: Arm, group: str) -> str | None:
    """The name of an arm's option in a group; None where the record has none."""
    name = (arm.config.get(group) or {}).get("name")
    return None if name is None else str(name)


def families(arms: Sequence[Arm], group: str) -> list[list[Arm]]:
    """Arms whose settings agree in all but one option, of which each family has at least two."""
    found: dict[tuple[str, ...], list[Arm]] = {}
    for arm in arms:
        settings = (str(setting) for setting in arm.plan.get("overrides") or ())
        others = tuple(setting for setting in settings if not setting.startswith((f"{group}=", f"{group}.")))
        if option(arm, group) is not None:
            found.setdefault(others, []).append(arm)
    return [family for family in found.values() if len({option(arm, group) for arm in family}) > 1]


def chart(report: Report, kept: Kept) -> Chart:
    title = f"{kept.group.replace('_', ' ').capitalize()}: bytes of {kept.what} against speed and quality"
    found = families(report.arms, kept.group)
    sizes = {
        arm.index: size for family in found for arm in family if (size := kept.size(arm)) and arm.metrics.get(SPEED)
    }
    seen = [arm for arm in report.arms if arm.index in sizes]
    if not seen:
        nothing = f"No two arms differ in their {kept.group} alone, each with a size and a speed."
        return Chart(kept.key, title, "", Table((), ()), empty=nothing)
    drawn = [quality for quality in DRAWN if any(arm.metrics.get(quality.metric) is not None for arm in seen)]
    traces = [_joined(family, sizes, kept) for family in found] if len(found) > 1 else []
    points = [_named(arm, sizes[arm.index] * kept.scale, kept, report.confidence) for arm in seen]
    ends = _ends(points, [rate for arm in seen for rate in arm.by_trial(output_rate).values()])
    places = placed(points, ends, (PANEL_WIDTH_PX, PANEL_PX)) if len(seen) <= LABELLED_ARMS else []
    for arm, point, place in zip_longest(seen, points, places):
        traces += _speed(arm, point, kept, place)
        traces += [_quality(arm, point.x, quality, index) for index, quality in enumerate(drawn)]
    layout, height = _layout(seen, kept, drawn, ends)
    names, height, wide = ({"showlegend": False}, height, False) if places else legend(len(seen), height)
    layout |= names
    note = (
        f"Arms that differ in their {kept.group} alone{', joined by a line' if len(found) > 1 else ''}. Filled: median "
        f"of the trials, with a {percent(report.confidence, 0)} interval where there are at least {INTERVAL_FROM}; "
        f"open: each trial. {kept.note} Fewer bits change what the model says: what was measured of "
        "that is drawn below the speed and stands in the table (equal output: requests whose every token is the "
        "reference's)."
    )
    phases = {arm.index: median_rates(arm.ok) for arm in seen}
    if all(prefill is None for prefill, _ in phases.values()):
        phases = {}
    else:
        note += " Equal requests that come at once: prefill tok/s is prompt tokens / TTFT, decode tok/s requests / ITL."
    if kept is WEIGHTS:
        note += _permutations(seen)
    if drawn:
        note += (
            f" Intervals of quality: {percent(CONFIDENCE, 0)}, over the texts that it was measured on, where there are "
            f"at least {INTERVAL_FROM}; perplexity's is mostly of how texts differ, which they do for all arms alike."
        )
        if any(quality.scale_of(seen).get("type") == "log" for quality in drawn):
            note += " A logarithmic axis has no place for 0, as bf16's KL to itself."
    else:
        note += " No quality was measured here."
    if any(arm.emulated for arm in seen):
        note += f" Speed emulated, not to be compared: {', '.join(arm.name for arm in seen if arm.emulated)}."
    table = _table(seen, sizes, kept, drawn, phases, report.confidence)
    return Chart(kept.key, title, note, table, traces, layout, height, wide=wide)


def _permutations(seen: Sequence[Arm]) -> str:
    """Of which arms the channels were permuted, and why."""
    chosen = [(arm.name, arm.config.get("precision") or {}) for arm in seen]
    seeds = {name: option["permutation_seed"] for name, option in chosen if "permutation_seed" in option}
    permuted = [name for name, seed in seeds.items() if seed is not None]
    if not permuted:
        return ""
    left = [name for name, seed in seeds.items() if seed is None]
    exceptions = f" (not of {', '.join(left)})" if left else ""
    return (
        " Before quantising, the model's channels were put in another order by a seeded permutation that changes no "
        f"output{exceptions}: projections that were quantised once, as SmolLM2's were to Q4_1, lie on a 4-bit grid by "
        "groups of neighbours, and quantising them again in the same groups would look as if it cost nothing."
    )


def output_rate(trial: TrialRecord) -> float | None:
    """Output tokens per second; None where nothing was measured."""
    rate: float | None = trial.run["metrics"].get(SPEED)
    return rate


def _joined(family: Sequence[Arm], sizes: Mapping[int, float], kept: Kept) -> dict[str, Any]:
    """A line through the speeds of a family that are its own."""
    points = [(sizes[arm.index], arm) for arm in family if arm.index in sizes and not arm.emulated]
    points.sort(key=lambda point: point[0])
    return {
        "type": "scatter",
        "mode": "lines",
        "x": floats((size * kept.scale for size, _ in points), 3),
        "y": floats(arm.metrics[SPEED] for _, arm in points),
        "line": {"color": "@muted", "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {"points": [arm.index for _, arm in points]},
    }


def _shared(arm: Arm) -> dict[str, Any]:
    return {"type": "scatter", "legendgroup": str(arm.index), "name": label(arm.name), "cliponaxis": False}


def _named(arm: Arm, size: float, kept: Kept, confidence: float) -> Named:
    """Its median, with the option's name; ``size`` in the unit of the axis."""
    name = f"{label(option(arm, kept.group), 16)}{' (emulated)' if arm.emulated else ''}"
    trials = list(arm.by_trial(output_rate).values())
    return Named(name, size, arm.metrics[SPEED] or 0.0, (None, None), around(trials, confidence))


def _ends(points: Sequence[Named], trials: Sequence[float]) -> tuple[float, float]:
    """Of the axes of bytes and speed, which begin at 0."""
    speeds = room([point.y for point in points], [*(point.y_bounds[1] for point in points), *trials])
    return round(1.12 * max(point.x for point in points), 4), speeds


def _speed(arm: Arm, point: Named, kept: Kept, place: str | None) -> list[dict[str, Any]]:
    """Every trial, and their median with its interval and, where there is a place for it, its name."""
    trials = list(arm.by_trial(output_rate).values())
    look = {"color": arm.colour, "symbol": f"{arm.marker}-open"}
    return [
        {
            **_shared(arm),
            "mode": "markers",
            "x": floats([point.x] * len(trials), 3),
            "y": floats(trials),
            "marker": {**look, "size": 7},
            "opacity": 0.55,
            "showlegend": False,
            "hovertemplate": "%{fullData.name}, one trial<br>%{y:.1f} tok/s<extra></extra>",
        },
        {
            **_shared(arm),
            "mode": "markers+text" if place else "markers",
            "x": floats([point.x], 3),
            "y": floats([point.y]),
            "error_y": error_bars([point.y], [point.y_bounds], arm.colour),
            "text": [point.name],
            **({"textposition": place} if place else {}),
            "marker": {**look, "size": 12, **({} if arm.emulated else {"symbol": arm.marker})},
            "hovertemplate": f"%{{fullData.name}}<br>%{{y:.1f}} tok/s with %{{x:.4g}} {kept.unit}<extra></extra>",
        },
    ]


def _quality(arm: Arm, size: float, quality: Quality, index: int) -> dict[str, Any]:
    known = (arm.metrics.get(quality.metric), *quality.bounds(arm))
    value, low, high = (None if each is None else each * quality.scale for each in known)
    return {
        **_shared(arm),
        "mode": "markers",
        "x": floats([size], 3),
        "y": floats([value], 6),
        "error_y": error_bars([value], [(low, high)], arm.colour),
        "marker": {"color": arm.colour, "symbol": arm.marker, "size": 10},  # emulated arithmetic has its real quality
        "hovertemplate": f"%{{fullData.name}}<br>{quality.shown} %{{y:.5g}} {quality.unit}<extra></extra>",
        "yaxis": f"y{index + 2}",
        "showlegend": False,
    }


def _layout(
    seen: Sequence[Arm], kept: Kept, drawn: Sequence[Quality], ends: tuple[float, float]
) -> tuple[dict[str, Any], int]:
    """The speed above, a lower panel for each quality, on one axis of bytes."""
    inner = PANEL_PX + (QUALITY_PX + GAP_PX) * len(drawn)
    layout: dict[str, Any] = {
        "margin": MARGIN,
        "xaxis": {
            "title": {"text": f"{kept.what} ({kept.unit})"},
            "range": [0, ends[0]],
            "anchor": f"y{len(drawn) + 1}" if drawn else "y",
        },
        "yaxis": {
            "title": {"text": "output of the machine (tok/s)"},
            "range": [0, ends[1]],
            "domain": [1 - PANEL_PX / inner, 1],
        },
        "hovermode": "closest",
    }
    for index, quality in enumerate(drawn):
        top = inner - PANEL_PX - GAP_PX - index * (QUALITY_PX + GAP_PX)
        layout[f"yaxis{index + 2}"] = {
            **quality.scale_of(seen),
            "domain": [max(0.0, (top - QUALITY_PX) / inner), top / inner],
            "anchor": "x",
            "nticks": 4,
        }
    return layout, inner + MARGIN["t"] + MARGIN["b"]


def _table(
    arms: Sequence[Arm],
    sizes: Mapping[int, float],
    kept: Kept,
    drawn: Sequence[Quality],
    phases: Mapping[int, tuple[float | None, float | None]],
    confidence: float,
) -> Table:
    qualities = (EQUAL_OUTPUT, *drawn)
    rows = []
    for arm in arms:
        size = Cell(byte_size(sizes[arm.index]), sizes[arm.index])
        of_trials = around(list(arm.by_trial(output_rate).values()), confidence)
        rows.append(
            [
                text_cell(arm.name),
                text_cell(option(arm, kept.group)),
                *((arm.cell(name, byte_size) for name in OF_THE_WEIGHTS) if kept is WEIGHTS else (size,)),
                beside(arm.cell(SPEED, fixed(1)), of_trials, fixed(1)),
                arm.cell("itl_s.p50", fixed(1, 1e3)),
                *(number_cell(rate, 0) for rate in phases.get(arm.index, ())),
                *(quality.cell(arm) for quality in qualities),
                number_cell(len(arm.ok), 0),
            ]
        )
    sizes_of = (kept.what, "on disk") if kept is WEIGHTS else (kept.what,)
    columns = ("arm", kept.group.replace("_", " "), *sizes_of, "output tok/s", "ITL p50 (ms)")
    shown = ("prefill tok/s", "decode tok/s") if phases else ()
    return Table((*columns, *shown, *(quality.axis for quality in qualities), "trials (n)"), rows)
