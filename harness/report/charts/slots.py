"""Slot occupancy over time: who holds which row of the batch, and whether the row still yields tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.records import TrialRecord
from harness.report.data import Arm, Report
from harness.report.panels import axis_key, axis_name, panel_arms, panel_title, stack, time_range, which_trials
from harness.report.parts import Chart, Table, counted, floats, label, number_cell, percent, percent_cell, text_cell

PREFILL, DECODE, DEAD = "prefill", "decode", "dead"
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    PREFILL: ("until its first token", {"color": "@prefill"}),
    DECODE: ("decoding", {"color": "@used"}),
    DEAD: (
        "finished, still holds its row",
        {"color": "@deadback", "pattern": {"shape": "/", "size": 5, "solidity": 0.35, "fgcolor": "@dead"}},
    ),
}
MAX_BARS = 2000
ROW_PX, LEAST_PX, MOST_PX = 14, 58, 112


@dataclass(frozen=True)
class Bar:
    """One request in one slot in one state, from a step's start to a step's end."""

    slot: int
    request_id: str
    state: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Occupancy:
    """``seconds``: slot-seconds of step time by state; what is left of ``capacity_s`` was empty."""

    bars: list[Bar]
    num_slots: int
    used_slots: int
    seconds: dict[str, float]
    capacity_s: float

    def share(self, state: str) -> float | None:
        """Of the time that all slots together had; None where they had none."""
        return self.seconds[state] / self.capacity_s if self.capacity_s > 0 else None

    @property
    def empty_share(self) -> float | None:
        """As `share`, of the time in which nobody held them."""
        return max(0.0, 1 - sum(self.seconds.values()) / self.capacity_s) if self.capacity_s > 0 else None


def occupancy(trial: TrialRecord) -> Occupancy:
    """A row is dead in every step that starts after its request's end."""
    ends: dict[str, tuple[float, float]] = {
        str(row.request_id): (_or_inf(row.first_token_s), _or_inf(row.finished_s))
        for row in trial.requests.itertuples(index=False)
    }
    bars: list[Bar] = []
    seconds = dict.fromkeys(STATES, 0.0)
    open_bars: dict[int, tuple[str, str, float, float]] = {}
    num_slots, used, capacity_s = 0, -1, 0.0
    columns = (trial.steps[name] for name in ("start_s", "end_s", "slot_request_ids"))
    for start, end, slots in zip(*columns, strict=True):
        held: dict[int, tuple[str, str, float, float]] = {}
        num_slots = max(num_slots, len(slots))
        capacity_s += (end - start) * len(slots)
        for slot, request_id in enumerate(slots):
            if request_id is None:
                continue
            first, last = ends.get(request_id, (math.inf, math.inf))
            state = DEAD if start >= last else DECODE if start >= first else PREFILL
            seconds[state] += end - start
            before = open_bars.pop(slot, None)
            if before is not None and before[:2] == (request_id, state):
                held[slot] = (request_id, state, before[2], end)
            else:
                if before is not None:
                    bars.append(Bar(slot, *before))
                held[slot] = (request_id, state, start, end)
                used = max(used, slot)
        bars += [Bar(slot, *bar) for slot, bar in open_bars.items()]
        open_bars = held
    bars += [Bar(slot, *bar) for slot, bar in open_bars.items()]
    bars.sort(key=lambda bar: (bar.start_s, bar.slot))
    return Occupancy(bars, num_slots, used + 1, seconds, capacity_s)


def chart(report: Report) -> Chart:
    drawn, total = panel_arms(report, lambda trial: bool(trial.steps["slot_request_ids"].map(len).max() > 0))
    seen = [(arm, occupancy(trial)) for arm, trial in drawn]
    title = "Slot occupancy: each row a slot of the batch, each bar a request"
    if not seen:
        return Chart("slots", title, "", Table((), ()), empty="No step of any arm recorded who held which slot.")
    limit = report.points(MAX_BARS, 200)
    heights = [panel_height(occupied.used_slots) for _, occupied in seen]
    layout, height = stack(heights, [_title(arm, occupied) for arm, occupied in seen], time_range(drawn))
    layout |= {"barmode": "overlay", "bargap": 0, "showlegend": False, "hovermode": "closest"}
    traces: list[dict[str, Any]] = []
    shown_bars = 0
    for index, (_, occupied) in enumerate(seen):
        rows = max(1, occupied.used_slots)
        layout[axis_key(index)] |= {
            "range": [rows - 0.5, -0.5],
            "tick0": 0,
            "dtick": max(1, math.ceil(rows / 4)),
            "showgrid": False,
            "title": {"text": "slot"},
        }
        kept = occupied.bars[:limit]
        shown_bars += len(kept)
        traces += _traces(kept, axis_name(index))
    all_bars = sum(len(occupied.bars) for _, occupied in seen)
    note = (
        f"{which_trials(drawn, total)} Blue: a request that still yields tokens (fainter until its first one). "
        "Hatched: it has finished, but its row is computed until the batch ends. Blank: nobody. Recomputation after "
        f"preemption counts as decoding. {shown_bars:,} of {all_bars:,} bars, by start; shares of all slot time."
    )
    for (arm, trial), (_, occupied) in zip(drawn, seen, strict=True):
        hidden = dead_seconds(trial) - occupied.seconds[DEAD]
        if hidden > 0.01 * occupied.capacity_s:
            note += (
                f" {arm.name}: tokens were held until their batch ended, so dead rows "
                f"({percent(hidden / occupied.capacity_s)} of slot time) look like decoding ones."
            )
    return Chart("slots", title, note, _table(seen), traces, layout, height)


def dead_seconds(trial: TrialRecord) -> float:
    """Slot-seconds of dead rows as the steps counted them."""
    steps = trial.steps
    return float((steps["dead_rows"].fillna(0) * (steps["end_s"] - steps["start_s"])).sum())


def used_slots(trial: TrialRecord) -> int:
    """How many rows its panel has: up to the highest slot that anybody held."""
    held = (slot + 1 for slots in trial.steps["slot_request_ids"] for slot, owner in enumerate(slots) if owner)
    return max(held, default=0)


def panel_height(rows: int) -> int:
    return min(MOST_PX, max(LEAST_PX, ROW_PX * rows))


def _title(arm: Arm, occupied: Occupancy) -> str:
    slots = f"{occupied.used_slots} of {occupied.num_slots} slots used"
    if occupied.used_slots == occupied.num_slots:
        slots = counted(occupied.num_slots, "slot")
    dead = occupied.share(DEAD)
    return panel_title(arm, slots, f"dead {percent(dead, 0)}", f"empty {percent(occupied.empty_share, 0)}")


def _traces(bars: list[Bar], axis: str) -> list[dict[str, Any]]:
    by_state: dict[str, list[Bar]] = defaultdict(list)
    for bar in bars:
        by_state[bar.state].append(bar)
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": meaning,
            "base": floats((bar.start_s for bar in by_state[state]), 4),
            "x": floats((bar.end_s - bar.start_s for bar in by_state[state]), 4),
            "y": [bar.slot for bar in by_state[state]],
            "width": 0.84,
            "marker": {**marker, "line": {"width": 0.7, "color": "@paper"}},
            "customdata": [[label(b.request_id), round(b.start_s, 3), round(b.end_s, 3)] for b in by_state[state]],
            "hovertemplate": f"%{{customdata[0]}}: {meaning}<br>%{{customdata[1]}} to %{{customdata[2]}} s"
            "<extra></extra>",
            "yaxis": axis,
        }
        for state, (meaning, marker) in STATES.items()
        if by_state[state]
    ]


def _table(seen: list[tuple[Arm, Occupancy]]) -> Table:
    columns = ("arm", "slots", "slots used", "until first token", "decoding", "dead", "empty", "utilisation, some wait")
    rows = []
    for arm, occupied in seen:
        rows.append(
            [
                text_cell(arm.name),
                number_cell(occupied.num_slots, 0),
                number_cell(occupied.used_slots, 0),
                *(percent_cell(occupied.share(state)) for state in STATES),
                percent_cell(occupied.empty_share),
                arm.cell("slot_utilization", percent),
            ]
        )
    return Table(columns, rows)


def _or_inf(value: Any) -> float:
    return math.inf if pd.isna(value) else float(value)
