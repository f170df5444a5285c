"""Roofline and the requests' lives: figures worked out by hand from records."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from simulated_run import LADDER, ArmPlan, run_record, write_measured, write_plan

from harness.records import REQUEST_SCHEMA, STEP_SCHEMA, TrialRecord, frame, read_trial, write_trial
from harness.report.charts import gantt, roofline
from harness.report.charts.gantt import request_lives
from harness.report.charts.roofline import Roof
from harness.report.data import Report, load
from harness.report.figures import step_figures
from harness.report.work import pooled
from harness.statistics import interval

LIMITS = {"flops_per_s": 100e9, "bytes_per_s": 20e9, "source": "measured"}
FLOPS, BYTES = 1e9, 2.7e8  # of every step of the scripted engine


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Two arms whose machine's limits are known, and one whose speed is emulated."""
    run_dir = tmp_path_factory.mktemp("limited")
    plans = (LADDER[2], ArmPlan("int8", precision="int8", speed=0.8), LADDER[5])
    write_plan(run_dir, plans, 2, 6)
    for plan in plans:
        for trial in range(2):
            faster = 2 if plan.precision == "int8" else 1
            limits = {**LIMITS, "flops_per_s": faster * LIMITS["flops_per_s"]}
            write_measured(run_dir, "ladder", plan, trial, 6, limits=limits)
    return load(run_dir)


# --- roofline ---------------------------------------------------------------------------------------------------------


Step = tuple[int, int, float | None, float | None, float]


def record_of(path: Path, rows: list[Step], requests: pd.DataFrame | None = None) -> TrialRecord:
    """Steps by (prefill tokens, decode tokens, FLOPs, bytes, seconds), one after the other."""
    columns: dict[str, list[object]] = {name: [None] * len(rows) for name in STEP_SCHEMA.names}
    ends = np.cumsum([row[4] for row in rows]).tolist()
    columns |= {"start_s": [0.0, *ends[:-1]], "end_s": ends, "slot_request_ids": [[] for _ in rows]}
    for i, name in enumerate(("prefill_tokens", "decode_tokens", "flops", "bytes")):
        columns[name] = [row[i] for row in rows]
    write_trial(path, run_record("hand", ArmPlan("one"), 0, 1), requests, frame(columns, STEP_SCHEMA))
    return read_trial(path)


def test_steps_are_told_apart_by_whether_they_prefill_and_unknown_ones_are_left_out(tmp_path: Path) -> None:
    trial = record_of(
        tmp_path / "0",
        [(64, 3, 8e9, 2e9, 0.5), (0, 4, 1e9, 1e9, 0.1), (0, 4, 3e9, 1e9, 0.3), (0, 4, None, 1e9, 9.0), (0, 0, 1, 1, 9)],
    )
    work = step_figures(trial).work
    assert work["prefill"].intensity == 4.0 and work["prefill"].flops_per_s == pytest.approx(16e9)
    assert work["decode"].intensity == 2.0 and work["decode"].flops_per_s == pytest.approx(10e9)  # 4e9 in 0.4 s
    assert (work["decode"].least, work["decode"].most) == (1.0, 3.0)
    assert step_figures(record_of(tmp_path / "1", [(0, 4, None, None, 1.0)])).work == {}
    twice = pooled([work, {}, {"decode": work["decode"]}])
    assert (twice["decode"].steps, twice["prefill"].steps, twice["decode"].intensity) == (4, 1, 2.0)
    assert twice["decode"].flops_per_s == work["decode"].flops_per_s and twice["decode"].least == 1.0


def test_a_roof_rises_with_the_memory_up_to_the_arithmetic() -> None:
    roof = Roof(100e9, 20e9, "measured")
    assert (roof.at(1), roof.at(5), roof.at(50), roof.ridge) == (20e9, 100e9, 100e9, 5.0)


def test_points_and_roofs_are_those_of_the_records(limited: Report) -> None:
    found = roofline.chart(limited)
    large = [t for t in found.traces if t["mode"] == "markers" and "opacity" not in t]
    assert [t["name"] for t in large] == ["paged", "paged", "int8", "int8"]  # prefill and decode; none emulated
    assert {x for t in large for x in t["x"]} == {round(FLOPS / BYTES, 5)}
    steps = limited.arms[0].ok[0].steps, limited.arms[0].ok[1].steps
    decode = [s[(s["prefill_tokens"] == 0) & (s["decode_tokens"] > 0)] for s in steps]
    count, seconds = sum(map(len, decode)), sum((s["end_s"] - s["start_s"]).sum() for s in decode)
    assert large[1]["y"] == [pytest.approx(count * FLOPS / seconds * 1e-9, abs=1e-5)]
    assert [t[f"error_{axis}"]["array"] for t in large for axis in "xy"] == [[None]] * 8  # two trials have no interval
    roofs = {t["name"]: t for t in found.traces if t["mode"] == "lines"}
    assert set(roofs) == {"100 GFLOP/s, measured: bf16", "200 GFLOP/s, measured: int8"}
    assert len({line["line"]["dash"] for line in roofs.values()}) == 2  # told apart in the legend
    for peak, line in zip((100, 200), roofs.values(), strict=True):
        assert line["y"] == pytest.approx([min(peak, 20 * x) for x in line["x"]], rel=1e-3)  # 20 GB/s up to the peak
    assert "Speed emulated, so not drawn: fp8" in found.note
    row = dict(zip(found.table.columns, [cell.text for cell in found.table.rows[1]], strict=True))
    assert (row["arm"], row["steps"], row["steps (n)"], row["bound by"]) == ("paged", "decode", str(count), "memory")
    assert row["roof there (GFLOP/s)"] == f"{20 * FLOPS / BYTES:.1f}"
    assert row["of the roof"] == f"{100 * (count * FLOPS / seconds) / (20e9 * FLOPS / BYTES):.1f} %"


def test_points_have_the_interval_of_their_trials(ladder: Path) -> None:
    report = load(ladder)
    found = roofline.chart(report)
    arm = next(arm for arm in report.arms if arm.name == "continuous")
    point = [t for t in found.traces if t["name"] == arm.name and "error_y" in t][-1]
    rates = []
    for trial in arm.ok:
        decode = trial.steps[(trial.steps["prefill_tokens"] == 0) & (trial.steps["decode_tokens"] > 0)]
        rates.append(len(decode) * FLOPS / (decode["end_s"] - decode["start_s"]).sum() * 1e-9)
    bounds = interval([math.log(rate) for rate in rates])
    assert len(set(rates)) == 3 and bounds is not None
    low, high = map(math.exp, bounds)
    assert point["y"][0] - point["error_y"]["arrayminus"][0] == pytest.approx(low, abs=1e-4)
    assert point["y"][0] + point["error_y"]["array"][0] == pytest.approx(high, abs=1e-4)
    assert (point["error_x"]["array"], point["error_y"]["color"]) == ([0], arm.colour)  # every step has one intensity
    row = next(row for row in found.table.rows if [row[0].text, row[1].text] == [arm.name, "decode"])
    assert [row[3].text, row[4].text] == ["3.70 [3.70, 3.70]", f"{row[4].value * 1e-9:,.2f} [{low:,.2f}, {high:,.2f}]"]
    assert "95 % interval" in found.note


def test_without_limits_there_are_points_and_no_roof(ladder: Path) -> None:
    found = roofline.chart(load(ladder))
    assert {t["mode"] for t in found.traces} == {"markers"} and "No roof" in found.note


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_life_is_waiting_prefill_and_decoding(ladder: Path) -> None:
    trial = load(ladder).arms[0].ok[0]
    lives = request_lives(trial)
    table = pq.read_table(trial.path / "requests.parquet").to_pandas().set_index("request_id")
    assert len(lives.request_ids) == len(table) == 48
    for row, request_id in enumerate(lives.request_ids):
        request = table.loc[request_id]
        spans = {phase: (lives.starts[phase][row], lives.ends[phase][row]) for phase in gantt.PHASES}
        assert spans["queueing"] == (request["intended_s"], request["scheduled_s"])
        assert spans["prefill"] == (request["scheduled_s"], request["first_token_s"])
        assert spans["decode"] == (request["first_token_s"], request["finished_s"])


def test_what_never_came_further_stays_in_its_last_phase(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {name: [None] * 4 for name in REQUEST_SCHEMA.names}
    columns |= {"request_id": ["late", "hung", "cut", "refused"], "intended_s": [3.0, 1.0, 2.0, 0.0]}
    columns |= {"scheduled_s": [None, 1.5, 2.5, None], "first_token_s": [None, None, 3.5, None]}
    columns |= {"finished_s": [5.0, None, 4.5, 0.0]}
    columns |= {"finish_reason": ["error", None, "error", "rejected"]}
    columns |= {name: [[]] * 4 for name in ("output_token_ids", "emission_times_s", "emission_tokens")}
    lives = request_lives(record_of(tmp_path / "0", [(0, 1, 1, 1, 10.0)], frame(columns, REQUEST_SCHEMA)))
    assert lives.request_ids == ["refused", "hung", "cut", "late"]
    drawn = {
        phase: [
            (start, end) if end > start else None
            for start, end in zip(lives.starts[phase].tolist(), lives.ends[phase].tolist(), strict=True)
        ]
        for phase in gantt.PHASES
    }
    assert drawn == {
        "queueing": [None, (1.0, 1.5), (2.0, 2.5), (3.0, 5.0)],
        "prefill": [None, (1.5, 10.0), (2.5, 3.5), None],
        "decode": [None, None, (3.5, 4.5), None],
    }


def test_each_arm_has_a_panel_of_its_requests(ladder: Path) -> None:
    report = load(ladder)
    found = gantt.chart(report)
    assert len(found.layout["annotations"]) == len(report.arms)
    bars = sum(len(t["y"]) for t in found.traces if t["name"] == "decoding")
    assert 0 < bars <= 48 * len(report.arms) and f"{48 * len(report.arms)} requests" in found.note
