"""What the arm filter does to what several arms share: the frontier, joint gains, a row of those that did not run."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Page
from open_report import COMPARED, VISIBLE, choose, toggle
from simulated_run import LADDER, ArmPlan, run_record, write_measured, write_plan, write_run

from harness.records import read_run, write_trial
from harness.report import build
from harness.report.data import Arm, load
from harness.summary import summary_of

FRONTIER = """(({x, y}) => x.map((value, i) => [value, y[i]]))(
  document.querySelector('#chart-tradeoff').data.find((trace) => trace.name === 'frontier'))"""
MEDIANS = "document.querySelector('#chart-tradeoff').data.filter((trace) => trace.mode === 'markers+text').length"
TOGETHER = "document.querySelector('#chart-interaction')._fullLayout.yaxis.ticktext"
FACTORIAL = (
    ArmPlan("none", "static", "contiguous", 4),
    ArmPlan("continuous", "continuous", "contiguous", 4),
    ArmPlan("paged", "static"),
    ArmPlan("int8", "static", "contiguous", 4, speed=0.8, precision="int8"),
    ArmPlan("continuous+paged"),
    ArmPlan("paged+int8", "static", speed=0.8, precision="int8"),
)


def show(page: Page, run_dir: Path, chart: str) -> None:
    page.open(run_dir / "report.html", height=900)
    page.evaluate(f"document.querySelector('#chart-{chart}').scrollIntoView()")
    page.wait_for(f"document.querySelector('#chart-{chart}[data-drawn]')")


def edge(arms: list[Arm]) -> list[list[float]]:
    """Corners of the staircase above the points of these arms, from left to right; none above fewer than two."""
    speeds = [(1 / (arm.metrics["itl_s.p50"] or 0), arm.metrics["output_tokens_per_s"] or 0.0) for arm in arms]
    beaten = [any(o != p and o[0] >= p[0] and o[1] >= p[1] for o in speeds) for p in speeds]
    kept = sorted(point for point, below in zip(speeds, beaten, strict=True) if not below)
    return [[0, kept[0][1]], *map(list, kept), [kept[-1][0], 0]] if len(speeds) > 1 else []


def test_the_frontier_is_that_of_the_arms_that_are_shown(page: Page, ladder: Path) -> None:
    """One arm on it after the other is hidden: what lay behind it comes forward. fp8 is emulated, and never on it."""
    arms = load(ladder).arms
    show(page, ladder, "tradeoff")
    left = [arm for arm in arms if not arm.emulated]
    assert len(left) == 5 and len(arms) == 6
    drawn = []
    while True:
        drawn.append(page.evaluate(FRONTIER))
        assert drawn[-1] == [pytest.approx(corner, abs=1e-5) for corner in edge(left)]
        if len(left) == 1:
            break
        on_it = next(arm for arm in left if (arm.metrics["output_tokens_per_s"] or 0) == edge(left)[0][1])
        left.remove(on_it)
        toggle(page, on_it.index)
        page.wait_for(f"{MEDIANS} === {len(left) + 1}")  # and fp8
    assert len({str(corners) for corners in drawn}) == 5
    page.evaluate("document.querySelector('#compare button').click()")
    page.wait_for(f"{MEDIANS} === 6")
    assert page.evaluate(FRONTIER) == drawn[0] and page.console == []


def test_joint_gains_of_arms_that_are_hidden_leave_the_chart_and_its_table(page: Page, tmp_path: Path) -> None:
    build(write_run(tmp_path, FACTORIAL, trials=3, num_requests=8, study="hand"))
    show(page, tmp_path, "interaction")
    assert page.evaluate(TOGETHER) == ["continuous+paged", "paged+int8"]
    toggle(page, 4)
    page.wait_for(f"{TOGETHER}.length === 1")
    assert page.evaluate(TOGETHER) == ["paged+int8"]
    rows = "[...document.querySelectorAll('#interaction tbody tr')].filter((row) => !row.hidden).length"
    assert page.evaluate(rows) == 1
    toggle(page, 5)
    page.wait_for("document.querySelector('#interaction').hidden")
    assert page.console == []


def test_arms_that_share_a_row_because_they_did_not_run_are_no_others(page: Page, tmp_path: Path) -> None:
    """The second row stands for two arms: the arm behind them is the fourth."""
    plans = (LADDER[1], ArmPlan("graph_0"), ArmPlan("graph_1"), LADDER[2])
    write_plan(tmp_path, plans, 2, 4)
    for plan in (plans[0], plans[3]):
        for trial in range(2):
            write_measured(tmp_path, "ladder", plan, trial, 4)
    for plan in plans[1:3]:
        record = run_record("ladder", plan, 0, 4, status="not_run", reasons=["needs a CUDA device"])
        write_trial(tmp_path / plan.name / "0", record)
    build(tmp_path)
    page.open(tmp_path / "report.html", height=900)
    assert page.evaluate(VISIBLE) == ["continuous", "2 arms", "paged"]
    choose(page, 3)
    first, none, last = page.evaluate(COMPARED)
    wanted = summary_of(read_run(tmp_path))["arms"]["paged"]["ratios"]["output_tokens_per_s"]["median"]
    assert float(first["median"]) == pytest.approx(1 / wanted, rel=1e-12) and "vs paged" in first["text"]
    assert none is None and last["text"].strip() == "baseline"
    toggle(page, 1)
    assert page.evaluate(VISIBLE) == ["continuous", "2 arms", "paged"]
    toggle(page, 2)
    assert page.evaluate(VISIBLE) == ["continuous", "paged"]
    toggle(page, 3)
    assert page.evaluate(VISIBLE) == ["continuous"] and page.console == []
