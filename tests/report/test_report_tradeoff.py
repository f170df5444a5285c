"""Throughput against speed per user: intervals on its points, and which arms are on the frontier."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from simulated_run import HARDWARE, LADDER, ArmPlan, config_of, run_record, write_plan, write_run

from harness.records import write_trial
from harness.report.charts.tradeoff import chart, comparable_groups
from harness.report.data import Report, load
from harness.report.parts import MISSING
from harness.statistics import interval


def report_of(run_dir: Path, points: dict[str, tuple[float, float]], **changes: dict[str, Any]) -> Report:
    """Arms at (tok/s per user, tok/s) in their only trial; ``changes`` to an arm's run.json."""
    plans = tuple(map(ArmPlan, points))
    write_plan(run_dir, plans, 1, 1, study="hand")
    for plan in plans:
        speed, rate = points[plan.name]
        metrics = {"output_tokens_per_s": rate, "itl_s": {"p50": 1 / speed}}
        record = run_record("hand", plan, 0, 1, **{"metrics": metrics, **changes.get(plan.name, {})})
        write_trial(run_dir / plan.name / "0", record)
    return load(run_dir)


def test_points_have_the_interval_of_their_trials(tmp_path: Path) -> None:
    report = load(write_run(tmp_path, LADDER[:2], trials=3, num_requests=6))
    found = chart(report)
    for arm, row in zip(report.arms, found.table.rows, strict=True):
        drawn = next(t for t in found.traces if t["name"] == arm.name and "error_y" in t)
        trials = [t.run["metrics"] for t in arm.ok]
        for axis, values, column in (
            ("y", [t["output_tokens_per_s"] for t in trials], 2),
            ("x", [1 / t["itl_s"]["p50"] for t in trials], 5),
        ):
            bounds = interval([math.log(value) for value in values])
            assert bounds is not None
            low, high = (math.exp(end) for end in bounds)
            assert drawn[axis][0] - drawn[f"error_{axis}"]["arrayminus"][0] == pytest.approx(low, abs=1e-4)
            assert drawn[axis][0] + drawn[f"error_{axis}"]["array"][0] == pytest.approx(high, abs=1e-4)
            assert row[column].text == f"[{low:,.1f}, {high:,.1f}]"
            assert drawn[f"error_{axis}"]["color"] == arm.colour
    assert "95 % interval" in found.note


def test_arms_whose_window_holds_no_token_are_drawn(tmp_path: Path) -> None:
    """All requests came at once by an open loop: its window was over before the first token."""
    found = chart(report_of(tmp_path, {"one": (10.0, 0.0), "two": (20.0, 0.0)}))
    assert [trace["y"] for trace in found.traces if "error_y" in trace] == [[0.0], [0.0]]
    assert found.layout["yaxis"]["range"][1] > 0


def test_two_trials_have_no_interval(tmp_path: Path) -> None:
    found = chart(load(write_run(tmp_path, LADDER[:1], trials=2, num_requests=5)))
    bars = [trace["error_y"]["array"] for trace in found.traces if "error_y" in trace]
    assert bars == [[None]] and found.table.rows[0][2].text == MISSING


def test_the_page_is_given_every_arm_of_a_frontier_in_the_order_of_their_speed(tmp_path: Path) -> None:
    """Which of them are its edge depends on the filter (`test_report_browser_filter.py`), so the table names none."""
    points = {"slow": (2.0, 50.0), "wide": (4.0, 100.0), "fast": (9.0, 30.0), "twin": (9.0, 30.0), "worse": (9.0, 20.0)}
    found = chart(report_of(tmp_path, points))
    line = next(trace for trace in found.traces if trace["name"] == "frontier")
    assert line["meta"] == {"frontier": True, "points": [0, 1, 4, 2, 3]} and line["x"] == [2, 4, 9, 9, 9]
    assert line["y"] == [50, 100, 20, 30, 30] and line["line"]["shape"] == "vh"
    assert [[cell.text for cell in row if cell.text in points] for row in found.table.rows] == [[arm] for arm in points]


@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ({}, True),
        ({"emulated": ["by hand"]}, False),
        ({"clock": "virtual"}, False),
        ({"provenance": {"hardware": {**HARDWARE, "name": "another"}}}, False),
        ({"config": {"arrivals": {"name": "poisson", "rate": 4.0}, "num_requests": 9}}, True),
        ({"config": {"output_length": {"name": "constant", "value": 48}}}, False),
    ],
    ids=["alike", "emulated", "simulated", "machine", "load", "lengths"],
)
def test_what_shares_a_frontier(changes: dict[str, Any], together: bool, tmp_path: Path) -> None:
    if "config" in changes:
        config = config_of(ArmPlan("b"), 1)
        changes = {"config": {**config, "workload": {**config["workload"], **changes["config"]}}}
    report = report_of(tmp_path, {"a": (1.0, 1.0), "b": (2.0, 2.0), "c": (3.0, 0.5)}, b=changes)
    (group,) = comparable_groups(report.arms)
    assert [arm.name for arm in group] == (["a", "b", "c"] if together else ["a", "c"])
    (line,) = (trace for trace in chart(report).traces if trace["name"] == "frontier")
    assert line["x"] == ([1, 2, 3] if together else [1, 3])


def test_one_arm_alone_has_no_frontier(tmp_path: Path) -> None:
    found = chart(report_of(tmp_path, {"a": (1.0, 1.0)}))
    assert "frontier" not in [trace["name"] for trace in found.traces] and "frontier" not in found.note
