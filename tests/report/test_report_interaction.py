"""The chart of a factorial study: joint gains beside products of single ones, by hand, and where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from simulated_run import ArmPlan, run_record, write_plan

from harness.records import write_trial
from harness.report.charts import interaction
from harness.report.charts.interaction import reading
from harness.report.data import Report, load
from harness.report.page import sections
from harness.report.parts import MISSING
from harness.statistics import Ratio

NOISE = (1.0, 1.3, 0.8)  # of a whole block: it must cancel
PLANS = tuple(map(ArmPlan, ("none", "a", "b", "a+b")))


def report_of(run_dir: Path, joint: Sequence[float], changes: dict[str, Any] | None = None, arm: str = "b") -> Report:
    """Of 10, 15 and 20 tok/s and, in each trial, these with both; ``changes`` to an arm's run.json."""
    write_plan(run_dir, PLANS, 3, 1, study="hand")
    for trial, noise in enumerate(NOISE):
        for plan, rate in zip(PLANS, (10.0, 15.0, 20.0, joint[trial]), strict=True):
            told: dict[str, Any] = {"metrics": {"output_tokens_per_s": rate * noise}}
            told |= (changes or {}) if plan.name == arm else {}
            write_trial(run_dir / plan.name / str(trial), run_record("hand", plan, trial, 1, **told))
    return load(run_dir)


def in_the_page(report: Report) -> bool:
    return "Interactions" in [title for title, _ in sections(report)]


def test_what_both_give_stands_beside_the_product(tmp_path: Path) -> None:
    report = report_of(tmp_path, (24.0, 24.0, 24.0))
    found = interaction.chart(report)
    (row,) = [[cell.text for cell in row] for row in found.table.rows]
    assert row == [
        *("a+b", "2.40x [2.40, 2.40]", "3.00x", "0.80x [0.80, 0.80]", "3", "less than the product"),
    ]
    assert {trace["name"]: trace["x"] for trace in found.traces} == {
        "product of the single gains": [3.0],
        "together": [2.4],
    }
    assert found.layout["yaxis"]["ticktext"] == ["a+b"] and in_the_page(report)


def test_its_interval_is_that_of_the_ratio_and_a_wide_one_shows_nothing(tmp_path: Path) -> None:
    report = report_of(tmp_path, (30.0, 33.0, 28.0))
    found = interaction.chart(report)
    joint = Ratio(**report.summary["arms"]["a+b"]["ratios"]["output_tokens_per_s"])
    bars = found.traces[1]["error_x"]
    assert joint.median is not None and joint.low is not None and joint.high is not None
    assert bars["array"] == [pytest.approx(joint.high - joint.median, abs=1e-5)]
    assert bars["arrayminus"] == [pytest.approx(joint.median - joint.low, abs=1e-5)]
    assert found.table.rows[0][-1].text == "no difference shown" and "95 % interval" in found.note


def test_a_study_that_stops_by_its_intervals_has_stricter_ones_here_too(tmp_path: Path) -> None:
    report = report_of(tmp_path, (30.0, 33.0, 28.0))
    (plain,) = interaction.found(report)
    report.record.plan["half_width"] = 0.03
    (strict,) = interaction.found(report)
    for wide, narrow in ((strict.joint, plain.joint), (strict.deviation, plain.deviation)):
        assert wide.low is not None and narrow.low is not None and wide.low < narrow.low
    assert "98 % interval" in interaction.chart(report).note


@pytest.mark.parametrize(
    "changes",
    [{"emulated": ["by hand"]}, {"clock": "virtual"}, {"status": "failed", "reasons": ["by hand"]}],
    ids=["emulated", "simulated", "failed"],
)
def test_what_may_not_be_compared_has_no_product(changes: dict[str, Any], tmp_path: Path) -> None:
    """A factor that failed leaves the joint gain alone; one whose speed is not its own takes it away too."""
    report = report_of(tmp_path, (24.0, 24.0, 24.0), changes)
    if "status" in changes:
        (row,) = [[cell.text for cell in row] for row in interaction.chart(report).table.rows]
        assert row == ["a+b", "2.40x [2.40, 2.40]", MISSING, MISSING, "0", MISSING]
    else:
        assert not in_the_page(report) and "study=interaction" in interaction.chart(report).empty


def test_without_the_joint_arm_or_a_factorial_there_is_none(tmp_path: Path, ladder: Path) -> None:
    failed = {"status": "failed", "reasons": ["by hand"]}
    assert not in_the_page(report_of(tmp_path / "a", (24.0, 24.0, 24.0), failed, arm="a+b"))
    assert not in_the_page(report_of(tmp_path / "b", (24.0, 24.0, 24.0), failed, arm="none"))
    assert not in_the_page(load(ladder))


def test_more_than_the_product_is_said() -> None:
    assert reading(Ratio(1.2, 1.1, 1.3, 3, "better")) == "more than the product"
    assert reading(Ratio(1.2, None, None, 1, "no difference shown")) == MISSING
