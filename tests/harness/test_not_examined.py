"""A trial is recorded when its window is over; what its system is asked afterwards is added, or ends its process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from direct_study import run_study
from real_study import leftovers
from reliability_bodies import die_after_the_window
from test_faults_trial import ARM, trial_of

import harness.trial
from harness.arm import resolve_study
from harness.child import measure
from harness.compose import compose_arm
from harness.isolate import run_isolated
from harness.records import TrialRecord, read_trial
from harness.trial import Progress, run_trial
from harness.validity import NOT_EXAMINED

Notes = list[str]


def notes_of(record: TrialRecord) -> Notes:
    return [text for text in record.run["validity"] if text.startswith("not examined")]


def test_the_record_is_whole_before_and_complete_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examine, before = harness.trial.examine, []

    def look_first(*arguments: Any, **options: Any) -> Any:
        before.append(read_trial(tmp_path / "run/single/0"))
        assert len(before[0].requests) == 8 and len(before[0].steps) >= 12
        return examine(*arguments, **options)

    monkeypatch.setattr(harness.trial, "examine", look_first)
    status, after = trial_of(tmp_path)
    assert (status, before[0].run["status"], after.run["status"]) == (0, "ok", "ok")
    assert (notes_of(before[0]), notes_of(after)) == ([NOT_EXAMINED], [])
    assert before[0].run["linear_stages"] is None and after.run["linear_stages"]
    added = {name for name, value in after.run.items() if before[0].run[name] != value}
    assert added == {"linear_stages", "validity"}
    assert leftovers(tmp_path / "run") == [] and not list(after.path.glob(".*"))


def test_what_goes_wrong_after_the_window_is_told_and_costs_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise ValueError("no such layer")

    monkeypatch.setattr(harness.trial, "examine", fail)
    status, record = trial_of(tmp_path)
    assert (status, record.run["status"], len(record.requests)) == (0, "ok", 8)
    assert record.run["metrics"]["output_tokens_per_s"] > 0
    assert notes_of(record) == [f"{NOT_EXAMINED} (ValueError: no such layer)"]


def test_a_process_that_is_killed_after_the_window_leaves_its_trial(tmp_path: Path) -> None:
    command = [*ARM, f"run_dir={tmp_path / 'run'}"]
    assert run_study(command, partial(run_isolated, target=die_after_the_window)) == 0
    record = read_trial(tmp_path / "run/single/0")
    assert (record.run["status"], len(record.requests)) == ("ok", 8)
    (note,) = notes_of(record)
    assert note.startswith(NOT_EXAMINED) and "SIGKILL" in note
    assert leftovers(tmp_path / "run") == []
    written = (record.path / "run.json").read_bytes()
    assert run_study(command, partial(run_isolated, target=measure)) == 0  # a resumed study keeps it
    assert (record.path / "run.json").read_bytes() == written


def test_the_window_of_a_stopped_open_loop_ends_where_it_was_stopped(tmp_path: Path) -> None:
    """Its arrivals are known for 100 seconds: a rate over seconds that never were would be none."""
    traffic = ["workload/arrivals=poisson", "workload.arrivals.rate=20", "workload.num_requests=2000"]
    given = [option for option in ARM if not option.startswith(("workload/arrivals", "workload.num_requests"))]
    config = resolve_study({"arm": compose_arm((*given, *traffic, "workload.warmup_s=0"))})["arm"]
    steps = []

    def count(progress: Progress) -> None:
        steps.append(progress.steps)

    status = run_trial(
        config,
        **{"study": "s", "arm": "arm", "trial": 0, "seed": 1},
        out_dir=tmp_path / "0",
        isolated=False,
        on_progress=count,
        should_stop=lambda: steps[-1] >= 20,
    )
    record = read_trial(tmp_path / "0")
    window, last_s = record.run["window"], float(record.steps["end_s"].max())
    assert status == "aborted" and window["rule"] == "timed"
    assert last_s <= window["end_s"] < last_s + 20
    tokens = record.run["metrics"]["output_tokens"]
    assert tokens == record.requests["output_tokens"].sum() > 0
    assert record.run["metrics"]["output_tokens_per_s"] == pytest.approx(tokens / window["end_s"])
