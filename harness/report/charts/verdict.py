"""The verdict table: each arm's figures, its ratios to the baseline and to the arm it builds on, and what they show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from harness.report.charts.verdict_columns import columns
from harness.report.data import Arm, Report
from harness.report.parts import MISSING, Cell, Table, fixed, text_cell, times
from harness.statistics import direction

HEADLINE = "output_tokens_per_s"
SIGNS = {"better": "\u25b2", "worse": "\u25bc", "no difference shown": "\u2248", "not comparable": "\u2205"}
CLASSES = {"better": "better", "worse": "worse"}
FOREST_PX = 64
# Name, unit and scale of every metric that the long table shows, in its order.
METRICS: tuple[tuple[str, str, float, int], ...] = (
    ("output_tokens_per_s", "tok/s", 1, 1),
    ("requests_per_s", "1/s", 1, 3),
    ("goodput_per_s", "1/s", 1, 3),
    ("slo_attainment", "%", 100, 1),
    ("ttft_s.p50", "s", 1, 3),
    ("ttft_s.p99", "s", 1, 3),
    ("ttft_urgent_s.p50", "s", 1, 3),
    ("ttft_urgent_s.p99", "s", 1, 3),
    ("itl_s.p50", "ms", 1e3, 2),
    ("itl_s.p99", "ms", 1e3, 2),
    ("tpot_s.p50", "ms", 1e3, 2),
    ("tpot_s.p99", "ms", 1e3, 2),
    ("e2e_s.p50", "s", 1, 3),
    ("e2e_s.p99", "s", 1, 3),
    ("queueing_s.p50", "s", 1, 3),
    ("slot_utilization", "%", 100, 1),
    ("kv_utilization", "%", 100, 1),
    ("acceptance_rate", "%", 100, 1),
    ("tokens_per_step", "tok", 1, 3),
    ("prefix_hit_rate_planned", "%", 100, 1),
    ("prefix_hit_rate_ceiling", "%", 100, 1),
    ("prefix_hit_rate_observed", "%", 100, 1),
    ("kv_capacity_tokens", "tokens", 1, 0),
    ("mfu", "%", 100, 2),
    ("mbu", "%", 100, 2),
    ("peak_memory_bytes", "MB", 1e-6, 1),
    ("weights_bytes", "MB", 1e-6, 1),
    ("checkpoint_bytes", "MB", 1e-6, 1),
    ("startup_s", "s", 1, 2),
    ("ready_s", "s", 1, 2),
    ("equivalence", "%", 100, 1),
    ("perplexity", "", 1, 3),
    ("kl_vs_bf16", "nat", 1, 5),
    ("top1_agreement", "%", 100, 2),
    ("kv_transfer_bytes", "MB", 1e-6, 1),
    ("kv_transfer_s", "s", 1, 3),
    ("energy_j_per_output_token", "J/tok", 1, 3),
    ("cost_per_million_output_tokens", "", 1, 4),
)


@dataclass(frozen=True)
class RatioCell:
    """An arm over a reference: `1.84x [1.71, 1.98]`, its pairs and its verdict. Empty ``text``: nothing to show."""

    text: str
    verdict: str = ""
    n: int = 0
    reference: str = ""
    forest: Markup | str = ""
    source: tuple[str, ...] = ()
    value: float | None = None

    @property
    def said(self) -> str:
        return f"{SIGNS.get(self.verdict, '')} {self.verdict}".strip()

    @property
    def style(self) -> str:
        return CLASSES.get(self.verdict, "neutral")


@dataclass(frozen=True)
class Row:
    """``arms``: one, or several that did not run for the same reasons. ``message``: why there are no figures (failed,
    not run), in place of the cells.
    """

    arms: Sequence[Arm]
    changes: str
    headline: Cell
    cells: Sequence[Cell]
    baseline: RatioCell
    versus: RatioCell
    message: str
    n_trials: int

    @property
    def arm(self) -> Arm:
        return self.arms[0]


def rows(report: Report) -> list[Row]:
    span, shown = _span(report), columns(report)
    return [
        Row(
            arms,
            changes(arm, report),
            arm.cell(HEADLINE, fixed(1)),
            [column.cell(arm) for column in shown],
            RatioCell("baseline")
            if arm.name == report.baseline
            else ratio_cell(arm, "ratios", HEADLINE, report.baseline, span),
            ratio_cell(arm, "step_ratios", HEADLINE, arm.entry["versus"], span),
            "" if arm.metrics else "; ".join(map(str, arm.entry["reasons"])) or "no trial recorded",
            len(arm.ok),
        )
        for arms in _together(report.arms)
        for arm in arms[:1]
    ]


def _together(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Each by itself, but those that did not run for the same reasons as one, where the first of them stands."""
    found: dict[object, list[Arm]] = {}
    for arm in arms:
        key = tuple(map(str, arm.entry["reasons"])) if arm.entry["status"] == "not_run" else arm.index
        found.setdefault(key, []).append(arm)
    return list(found.values())


def changes(arm: Arm, report: Report) -> str:
    """The settings that this arm has and the arm it builds on (else the baseline) has not."""
    below = report.below(arm)
    own = [str(setting) for setting in arm.plan.get("overrides") or []]
    if below is None:
        others = [set(map(str, other.plan.get("overrides") or [])) for other in report.arms if other is not arm]
        common = set.intersection(*others) if others else set()
    else:
        common = set(map(str, below.plan.get("overrides") or []))
    return ", ".join(setting for setting in own if setting not in common)


def ratio_cell(
    arm: Arm, kind: str, metric: str, reference: str | None, span: tuple[float, float] | None = None
) -> RatioCell:
    """``kind``: ratios or step_ratios of `summary.json`; ``span``: of the picture, none without it."""
    found: Mapping[str, Any] = (arm.entry[kind] or {}).get(metric) or {}
    if not found:
        return RatioCell("")
    median, low, high = found["median"], found["low"], found["high"]
    picture = "" if span is None or median is None else forest(median, low, high, span)
    source = (arm.name, kind, metric, "median")
    text, verdict = times(median, low, high), verdict_text(found["n"], found["verdict"])
    return RatioCell(text, verdict, found["n"], reference or "", picture, source, median)


def verdict_text(n: int, verdict: str) -> str:
    """MISSING where nothing was compared for want of pairs: an arm without output shows no likeness to another."""
    return MISSING if n == 0 and verdict != "not comparable" else verdict


def below_cell(arm: Arm, below: Arm | None, metric: str) -> Cell:
    """An arm over the one that it builds on, else the baseline, for the table of a chart."""
    kind = "step_ratios" if arm.entry["versus"] else "ratios"
    found = RatioCell("") if below is None else ratio_cell(arm, kind, metric, below.name)
    return Cell(found.text or MISSING, found.value, found.source, follows=f"ratio {metric}")


def forest(median: float, low: float | None, high: float | None, span: tuple[float, float]) -> Markup:
    """A small picture of a ratio and its interval on a log axis, with a line at 1."""

    def x(value: float) -> float:
        share = (math.log(value) - math.log(span[0])) / (math.log(span[1]) - math.log(span[0]))
        return round(3 + min(1.0, max(0.0, share)) * (FOREST_PX - 6), 1)

    whisker = ""
    if low is not None and high is not None and low > 0:
        whisker = f'<line class="whisker" x1="{x(low)}" x2="{x(high)}" y1="8" y2="8"/>'
    return Markup(  # numbers only: nothing here comes from a record's text
        f'<svg class="forest" width="{FOREST_PX}" height="16" aria-hidden="true">'
        f'<line class="one" x1="{x(1)}" x2="{x(1)}" y1="0" y2="16"/>{whisker}'
        f'<rect x="{x(median) - 2.5:.1f}" y="5.5" width="5" height="5"/></svg>'
    )


def _span(report: Report) -> tuple[float, float]:
    """What the ratios' pictures cover: every median, every interval within a factor of 30, and 1."""
    seen = [1.0]
    for arm in report.arms:
        for kind in ("ratios", "step_ratios"):
            found = (arm.entry[kind] or {}).get(HEADLINE) or {}
            for value in (found.get("median"), found.get("low"), found.get("high")):
                if value is not None and 1 / 30 < value < 30:
                    seen.append(value)
    return min(seen) / 1.08, max(seen) * 1.08


def metrics_table(report: Report) -> Table:
    """Every arm and metric: value, both ratios, pairs and verdicts; of a percentile also of how many values it is."""
    table = []
    for arm in report.arms:
        for name, unit, scale, digits in METRICS:
            if arm.metrics.get(name) is None:
                continue
            cells = [
                text_cell(arm.name),
                text_cell(f"{name} ({unit})" if unit else name),
                arm.cell(name, fixed(digits, scale)),
            ]
            for kind, reference in (("ratios", report.baseline), ("step_ratios", arm.entry["versus"])):
                compared = direction(name) != 0 and reference not in (None, arm.name)
                ratio = ratio_cell(arm, kind, name, reference) if compared else RatioCell("")
                shown = ratio.verdict != ""
                cells += [
                    Cell(ratio.text, ratio.value, ratio.source if shown else ()),
                    Cell(f"{ratio.n}" if shown else ""),
                    Cell(ratio.said, numeric=False, style=ratio.style),
                ]
            of = name.rpartition(".")[0]
            cells.append(arm.cell(f"{of}.n", fixed(0)) if of else Cell(""))
            table.append(cells)
    ratios = [text for reference in ("baseline", "arm it builds on") for text in (f"vs {reference}", "n", "verdict")]
    return Table(("arm", "metric", "median over trials", *ratios, "values a trial (n)"), table)
