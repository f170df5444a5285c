"""The conditions above the table say what was done to the traffic, and a badge where an arm's figures come from."""

from __future__ import annotations

import re
from pathlib import Path

from simulated_run import ArmPlan, write_measured, write_plan, write_run

from harness.report import build
from harness.report.charts.conditions import conditions
from harness.report.data import load


def _run(run_dir: Path) -> Path:
    write_run(run_dir, trials=1, num_requests=6)
    return run_dir


def test_shortened_and_overlong_requests_and_a_scaled_clock_are_said(tmp_path: Path) -> None:
    report = load(_run(tmp_path))
    for arm in report.arms:
        for trial in arm.trials:
            trial.run["config"]["workload"] |= {"name": "trace", "time_scale": 0.5}
            trial.run["provenance"]["workload"] = {"num_requests": 300, "num_clipped": 180, "num_overlength": 2}
    assert dict(conditions(report))["requests"] == (
        "trace, 300 a trial; timestamps x0.5; 180 prompts shortened to fit (overlength=clip); "
        "2 too long for max_model_len, rejected"
    )


def test_traffic_as_it_came_needs_no_remark(tmp_path: Path) -> None:
    report = load(_run(tmp_path))
    assert ";" not in dict(conditions(report))["requests"]


def test_an_adaptive_study_says_how_many_trials_it_took_and_by_which_rule(tmp_path: Path) -> None:
    report = load(_run(tmp_path))
    report.record.plan.update({"half_width": 0.03, "trials": 20})
    said = "1 of at most 20 trials, interleaved; adaptive: 3 % on either side, 98 % intervals"
    assert dict(conditions(report))["trials"] == said
    report.record.plan["trials"] = 1
    assert dict(conditions(report))["trials"].endswith("98 % intervals; stopped by the limit")


def test_a_badge_says_where_an_arms_figures_come_from(tmp_path: Path) -> None:
    plans = (ArmPlan("ran"), ArmPlan("modelled"), ArmPlan("rounded", emulated=("by hand",)), ArmPlan("nothing"))
    write_plan(tmp_path, plans, 1, 5)
    for plan in plans[:3]:
        write_measured(tmp_path, "ladder", plan, 0, 5, clock="virtual" if plan.name == "modelled" else "real")
    badges = re.findall(r'</i>(\w+)</span><span class="badge (\w+)">', build(tmp_path).read_text("utf-8"))
    assert badges == [("ran", "measured"), ("modelled", "simulated"), ("rounded", "emulated"), ("nothing", "not_run")]
