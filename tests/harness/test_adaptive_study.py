"""An adaptive study from command line to exit status, its trials made by a fake runner."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import pytest
from fake_study import SWEEP, TINY, FakeRunner, run_dir

from harness.run_dir import blocks_due, read_plan, statuses

ADAPTIVE = [*SWEEP[:2], "study.half_width=0.03", "study.max_trials=9", *TINY]


def test_an_adaptive_study_stops_at_five_blocks_where_nothing_varies(command: Any, capsys: Any) -> None:
    runner = FakeRunner()
    assert command(runner, *ADAPTIVE) == 0
    assert {trial for _, trial in runner.ran} == set(range(5)) and len(runner.ran) == 10
    out = capsys.readouterr().out
    assert "18 trials at most, until every interval is within 3 % of its middle" in out and "[10/10]" in out
    again = FakeRunner()
    assert command(again, f"run_dir={run_dir().resolve()}") == 0
    assert again.ran == []


def test_an_adaptive_study_goes_on_until_its_intervals_are_narrow(command: Any) -> None:
    noisy = FakeRunner(noise=lambda job: 1.06 if (job["arm"], job["trial"]) == ("static", 0) else 1.0)
    assert command(noisy, *ADAPTIVE, through_hydra=True) == 0
    blocks = {trial for _, trial in noisy.ran}
    assert 5 < len(blocks) < 9 and blocks == set(range(len(blocks)))
    assert read_plan(run_dir())["half_width"] == 0.03


@pytest.mark.slow
def test_an_adaptive_study_ends_at_its_limit_and_resumes_within_it(command: Any) -> None:
    def wild(job: Mapping[str, Any]) -> float:
        return 1.5 if job["arm"] == "static" and job["trial"] % 2 else 1.0

    dying = FakeRunner(lambda job: "die" if job["trial"] == 6 else "ok", noise=wild)
    with pytest.raises(SystemExit):
        command(dying, *ADAPTIVE, through_hydra=True)
    rest = FakeRunner(noise=wild)
    assert command(rest, f"run_dir={run_dir().resolve()}", through_hydra=True) == 0
    assert {trial for _, trial in rest.ran} == {6, 7, 8}


def test_a_failing_arm_does_not_keep_an_adaptive_study_going_for_ever(command: Any) -> None:
    runner = FakeRunner(lambda job: "crash" if job["arm"] == "continuous" else "ok")
    assert command(runner, *ADAPTIVE) == 1
    assert {trial for _, trial in runner.ran} == set(range(5)) and len(runner.ran) == 10


def test_an_adaptive_study_needs_room_for_its_rule(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(FakeRunner(), *SWEEP[:2], "study.half_width=0.03", "study.max_trials=4", *TINY) == 2
    assert "study.max_trials=4" in capsys.readouterr().err
    assert command(FakeRunner(), *ADAPTIVE, "study.trials=3") == 2
    assert "study.trials: an adaptive study" in capsys.readouterr().err


def test_an_adaptive_study_keeps_what_it_has_run_when_a_repeated_trial_makes_it_superfluous(command: Any) -> None:
    def slow_once(job: Mapping[str, Any]) -> float:
        return 1.06 if (job["arm"], job["trial"]) == ("static", 0) else 1.0

    noisy, again = FakeRunner(noise=slow_once), FakeRunner()
    assert command(noisy, *ADAPTIVE) == 0
    blocks = {trial for _, trial in noisy.ran}
    assert len(blocks) > 5
    shutil.rmtree(run_dir() / "static" / "0")
    assert command(again, f"run_dir={run_dir().resolve()}") == 0
    assert again.ran == [("static", 0)]
    plan = read_plan(run_dir())
    assert blocks_due(run_dir(), plan) == len(blocks)
    assert {trial for _, trial in statuses(run_dir(), plan)} == blocks
