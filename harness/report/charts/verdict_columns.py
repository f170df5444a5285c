"""The columns of the verdict table behind its ratios: those that some arm has a value for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from harness.report.data import Arm, Report
from harness.report.parts import Cell, byte_size, fixed, number, percent


@dataclass(frozen=True)
class Column:
    """Of the verdict table, behind the ratios; ``group``: the heading that it shares with its neighbours.

    ``meaning``: for the legend. ``always``: also where no arm has a value for it. ``zero_counts``: a value of 0 is one.
    """

    heading: str
    cell: Callable[[Arm], Cell]
    group: str = ""
    meaning: str = ""
    always: bool = False
    zero_counts: bool = True

    def seen(self, arm: Arm) -> bool:
        """Whether this arm has something to show in it."""
        value = self.cell(arm).value
        return value is not None and (value != 0 or self.zero_counts)


def _metric(name: str, text: Callable[[float | None], str], style: str = "") -> Callable[[Arm], Cell]:
    return lambda arm: arm.cell(name, text, style)


def _short(value: float | None) -> str:
    return number(value, 0 if value is not None and value >= 1e4 else 2)


def _kv_waste(arm: Arm) -> Cell:
    parts = [arm.metrics.get(f"kv_waste.{part}") for part in ("internal", "reserved_ahead", "unusable")]
    known = [value for value in parts if value is not None]
    lost = math.fsum(known) if len(known) == len(parts) else None
    return Cell(percent(lost), lost)


def _latency(metric: str, group: str, text: Callable[[float | None], str]) -> tuple[Column, ...]:
    return (
        *(Column(p, _metric(f"{metric}.{p}", text), group, always=True) for p in ("p50", "p99")),
        Column("n", _metric(f"{metric}.n", fixed(0), "count"), group, always=True),
    )


COLUMNS = (
    *_latency("ttft_s", "TTFT (s)", number),
    *_latency("itl_s", "ITL (ms)", fixed(1, 1e3)),
    Column(
        "slot use",
        _metric("slot_utilization", percent),
        meaning="Slot use: rows that gave a kept token while a request waits, for contiguous caches.",
    ),
    Column("KV waste", _kv_waste, meaning="KV waste: internal, reserved ahead and unusable, of what is held."),
    Column("acceptance", _metric("acceptance_rate", percent)),
    Column(
        "planned",
        _metric("prefix_hit_rate_planned", percent),
        "prefix hits",
        "Prefix hits: share of the prompts' tokens that the traffic repeats (planned), that a cache without limit "
        "would serve in whole blocks (ceiling), and that were found (observed) in a cache of so many tokens.",
        zero_counts=False,
    ),
    Column("ceiling", _metric("prefix_hit_rate_ceiling", percent), "prefix hits", zero_counts=False),
    Column("observed", _metric("prefix_hit_rate_observed", percent), "prefix hits", zero_counts=False),
    Column("cache", _metric("kv_capacity_tokens", fixed(0)), "prefix hits"),
    Column("perplexity", _metric("perplexity", _short), "quality"),
    Column(
        "KL (nat)",
        _metric("kl_vs_bf16", fixed(4)),
        "quality",
        "KL, top-1: mean divergence from BF16, and how often both would say the same next token.",
    ),
    Column("top-1", _metric("top1_agreement", percent), "quality"),
    Column("peak memory", _metric("peak_memory_bytes", byte_size), always=True),
    Column(
        "first step",
        _metric("startup_s", fixed(1)),
        "ready (s)",
        "Ready: from the start of the trial's process to the end of its first step, and to that of the warm-up, "
        "with every shape that is compiled or captured.",
        always=True,
    ),
    Column("warm", _metric("ready_s", fixed(1)), "ready (s)", always=True),
)


def columns(report: Report) -> list[Column]:
    """Those that some arm has a value for."""
    return [column for column in COLUMNS if column.always or any(map(column.seen, report.arms))]


def headings(shown: Iterable[Column]) -> list[tuple[str, list[str]]]:
    """Neighbours under their common heading; a column without one stands alone under an empty one."""
    grouped: list[tuple[str, list[str]]] = []
    for group, members in groupby(shown, key=lambda column: column.group):
        names = [column.heading for column in members]
        grouped += [(group, names)] if group else [("", [name]) for name in names]
    return grouped
