"""The chart of swapping: sums by hand, arms that swapped and no others, and its place in the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_reader import Page
from simulated_run import ArmPlan, taken, write_run

from harness.records import write_trial
from harness.report import build
from harness.report.charts import swaps
from harness.report.data import load


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`swap` takes out 3 and 2 MB in its second and fifth step, and brings 3 MB back in its fourth."""
    run_dir = tmp_path_factory.mktemp("swapped")
    write_run(run_dir, [ArmPlan("recompute"), ArmPlan("swap", versus="recompute")], trials=1, num_requests=6)
    run, requests, steps, telemetry = taken(run_dir / "swap" / "0")
    count = len(steps)
    columns = {"swapped_out_bytes": [0] * count, "swapped_in_bytes": [0] * count, "preempted": [0] * count}
    columns["swapped_out_bytes"][1], columns["swapped_out_bytes"][4] = 3_000_000, 2_000_000
    columns["preempted"][1], columns["preempted"][4], columns["swapped_in_bytes"][3] = 2, 1, 3_000_000
    write_trial(run_dir / "swap" / "0", run, requests, steps.assign(**columns, swap_s=0.001), telemetry)
    return run_dir


def test_bytes_and_preemptions_over_time(swapped: Path) -> None:
    report = load(swapped)
    found = swaps.chart(report)
    lines = {trace["name"]: trace for trace in found.traces}
    assert list(lines) == ["swapped out", "swapped in", "preempted"]  # of one arm
    assert lines["swapped out"]["y"][:6] == [0, 3, 3, 3, 5, 5] and lines["swapped in"]["y"][:5] == [0, 0, 0, 3, 3]
    assert report.arms[1].shown is not None
    starts = report.arms[1].shown.steps["start_s"]
    assert lines["swapped out"]["x"][:3] == [pytest.approx(start, abs=1e-4) for start in starts[:3]]
    crosses = lines["preempted"]
    assert crosses["customdata"] == [2, 1] and crosses["y"] == [3, 5]
    assert crosses["x"] == [pytest.approx(starts[1], abs=1e-4), pytest.approx(starts[4], abs=1e-4)]
    (row,) = ([cell.text for cell in row] for row in found.table.rows)
    assert row[:4] == ["swap", "3", "5.0 MB", "3.0 MB"]
    assert found.layout["annotations"][0]["text"].startswith("<b>swap</b>")


def test_it_is_in_the_page_where_an_arm_swapped(swapped: Path, ladder: Path) -> None:
    assert "swaps" in Page(build(swapped)).specs
    assert not swaps.swaps(load(ladder)) and "No arm swapped" in swaps.chart(load(ladder)).empty


def test_a_record_that_does_not_tell_has_not_swapped(tmp_path: Path) -> None:
    write_run(tmp_path, [ArmPlan("old")], trials=1, num_requests=4)
    run, requests, steps, telemetry = taken(tmp_path / "old" / "0")
    write_trial(tmp_path / "old" / "0", run, requests, steps.assign(swapped_out_bytes=None), telemetry)
    assert not swaps.swaps(load(tmp_path))
