"""A study from command line to exit status, its trials made by a fake runner: blocks, resume, interruption."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_study import SWEEP, TINY, FakeRunner, run_dir

import harness.block
from harness.block import device_locks
from harness.compose import quoted
from harness.lock import held
from harness.plan import trial_seed
from harness.records import read_json
from harness.run_dir import pending_blocks, read_plan


def test_a_free_sweep_runs_every_arm_in_every_block(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runner = FakeRunner()
    assert command(runner, *SWEEP, through_hydra=True) == 0
    plan = read_plan(run_dir())
    assert runner.ran == [(arm, block) for block, arms in enumerate(plan["order"]) for arm in arms]
    assert sorted(runner.ran) == [(arm, block) for arm in ("continuous", "static") for block in range(3)]
    assert plan["baseline"] == "static" and plan["command"].startswith("python -m harness study=none")
    for job in runner.jobs:
        assert job["seed"] == trial_seed(0, job["trial"])
        assert job["config"]["batching"]["name"] == job["arm"]
        assert job["config"]["kv_cache"]["budget_bytes"] == plan["arms"]["static"]["config"]["kv_cache"]["budget_bytes"]
    out = capsys.readouterr().out
    assert out.count("continuous / static: 2.50x output tok/s (first pair)") == 1
    assert "[6/6]" in out and "ETA" in out


def test_only_our_files_are_made(command: Any) -> None:
    command(FakeRunner(), "study=none", *TINY, through_hydra=True)
    assert sorted(p.name for p in Path().iterdir()) == ["results"]
    assert sorted(p.name for p in run_dir().iterdir()) == [".lock", "single", "study.json"]
    assert os.readlink(run_dir()) == run_dir().resolve().name


def test_a_run_goes_on_where_the_file_system_has_no_links(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """exFAT, some network shares: `latest` is a convenience."""

    def refuse(link: Path, *arguments: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted", str(link))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    runner = FakeRunner()
    assert command(runner, "study=none", *TINY) == 0
    (made,) = run_dir().parent.iterdir()
    assert runner.ran == [("single", 0)] and read_plan(made)["study"] == "none"


def test_a_failed_trial_is_recorded_and_the_study_goes_on(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runner = FakeRunner(lambda job: "crash" if (job["arm"], job["trial"]) == ("static", 1) else "ok")
    assert command(runner, *SWEEP) == 1
    assert len(runner.ran) == 6
    failed = read_json(run_dir() / "static" / "1" / "run.json")
    assert (failed["status"], failed["reasons"]) == ("failed", ["RuntimeError: out of memory"])
    assert "static 1: failed: RuntimeError: out of memory" in capsys.readouterr().out


def test_a_resumed_run_keeps_ok_and_runs_the_rest(command: Any) -> None:
    first = FakeRunner(lambda job: "crash" if job["arm"] == "static" and job["trial"] < 2 else "ok")
    assert command(first, *SWEEP) == 1
    kept = (run_dir() / "continuous" / "0" / "run.json").stat().st_mtime_ns
    second = FakeRunner()
    assert command(second, f"run_dir={run_dir().resolve()}") == 0
    assert second.ran == [("static", 0), ("static", 1)]
    assert (run_dir() / "continuous" / "0" / "run.json").stat().st_mtime_ns == kept
    third = FakeRunner()
    assert command(third, f"run_dir={run_dir().resolve()}", "study.trials=3", "study=none") == 0
    assert third.ran == []


def test_a_model_file_that_changed_is_refused(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(FakeRunner(lambda job: "crash"), *SWEEP) == 1
    plan = json.loads((run_dir() / "study.json").read_text())
    plan["arms"]["static"]["fingerprints"]["model"] = "another file"
    (run_dir() / "study.json").write_text(json.dumps(plan))
    assert command(FakeRunner(), f"run_dir={run_dir().resolve()}") == 2
    assert "fingerprint" in (error := capsys.readouterr().err) and "start a new run" in error


def test_a_trace_that_changed_or_is_gone_is_refused(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else new trials are paired with old ones of other requests."""
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"input_length": 5, "max_tokens": 2}')
    sweep = ("study=none", "batching=static,continuous", "workload=trace", f"workload.path={trace}", "model=tiny")
    assert command(FakeRunner(lambda job: "crash"), *sweep) == 1
    trace.write_text('{"input_length": 500, "max_tokens": 2}')
    assert command(FakeRunner(), f"run_dir={run_dir().resolve()}") == 2
    assert "fingerprint of the.trace" in capsys.readouterr().err
    trace.unlink()
    assert command(FakeRunner(), f"run_dir={run_dir().resolve()}") == 2
    assert (error := capsys.readouterr().err).startswith("error: workload.path=") and error.count("\n") == 1


def test_a_killed_study_resumes_where_it_died(command: Any) -> None:
    whole = FakeRunner()
    command(whole, *SWEEP)
    dying = FakeRunner(lambda job: "die" if (job["arm"], job["trial"]) == whole.ran[3] else "ok")
    with pytest.raises(SystemExit):
        command(dying, *SWEEP)
    assert dying.ran == whole.ran[:4]
    rest = FakeRunner()
    assert command(rest, f"run_dir={run_dir().resolve()}") == 0
    assert rest.ran == whole.ran[3:]


def test_ctrl_c_keeps_the_records_and_resumes(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted = FakeRunner(lambda job: "interrupt" if len(interrupted.jobs) == 2 else "ok")
    assert command(interrupted, *SWEEP, through_hydra=True) == 130
    assert len(interrupted.ran) == 2
    arm, trial = interrupted.ran[1]
    assert read_json(run_dir() / arm / str(trial) / "run.json")["status"] == "aborted"
    resume = capsys.readouterr().err.strip()
    assert resume.startswith("interrupted; resume with: python -m harness run_dir=")
    rest = FakeRunner()
    assert command(rest, resume.rpartition(" ")[2]) == 0
    assert rest.ran[0] == (arm, trial) and len(rest.ran) == 5


def test_an_arm_that_cannot_run_is_recorded_with_its_reason(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runner = FakeRunner()
    arms = 'study.arms={short:{set:[]},long:{set:["execution=cuda_graph"]}}'
    assert command(runner, "study=none", arms, *TINY) == 0
    assert runner.ran == [("short", 0)]
    recorded = read_json(run_dir() / "long" / "0" / "run.json")
    assert recorded["status"] == "not_run" and "cuda" in recorded["reasons"][0]
    assert "not run: long: " in capsys.readouterr().out
    assert command(runner, f"run_dir={run_dir().resolve()}") == 0
    assert runner.ran == [("short", 0)]


def test_options_that_do_not_agree_with_the_record_are_named(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(FakeRunner(), *SWEEP)
    capsys.readouterr()
    runner = FakeRunner()
    given = ["study.trials=4", "seed=0", "workload.num_requests=5"]
    assert command(runner, f"run_dir={run_dir().resolve()}", *given) == 2
    error = capsys.readouterr().err
    assert "study.trials=4, workload.num_requests=5 is not what was recorded" in error and "seed" not in error
    assert runner.ran == []


def test_an_arm_that_composes_differently_now_is_not_mixed_in(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(FakeRunner(), *SWEEP)
    path = run_dir() / "study.json"
    plan = json.loads(path.read_text())
    plan["arms"]["static"]["config"]["batching"]["max_num_seqs"] = 77
    path.write_text(json.dumps(plan))
    assert command(FakeRunner(), f"run_dir={run_dir().resolve()}") == 2
    assert "arm static is no longer what study.json records: batching.max_num_seqs was 77" in capsys.readouterr().err


def test_a_recorded_target_is_never_run(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(FakeRunner(), *SWEEP)
    path = run_dir() / "study.json"
    path.write_text(path.read_text().replace("impls.batching.static.StaticBatching", "os.system"))
    assert command(FakeRunner(), f"run_dir={run_dir().resolve()}") == 2
    assert "batching._target_ was os.system" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["missing", "empty", "killed before the plan was written"])
def test_a_run_dir_without_a_plan_starts_a_new_run(command: Any, content: str) -> None:
    folder = Path("my runs/it's=1")
    if content != "missing":
        folder.mkdir(parents=True)
    if content.startswith("killed"):
        (folder / ".study.json.123.tmp").write_text("{")
    runner = FakeRunner()
    through_hydra = content == "missing"  # its job is told the folder's name once more
    assert command(runner, "study=none", *TINY, f"run_dir={quoted(str(folder))}", through_hydra=through_hydra) == 0
    assert runner.ran == [("single", 0)] and (folder / "single" / "0" / "run.json").is_file()
    assert list(folder.glob(".*.tmp")) == []


def test_a_folder_of_something_else_is_left_alone(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("home").mkdir()
    Path("home/letter.txt").write_text("dear")
    assert command(FakeRunner(), "study=none", *TINY, "run_dir=home") == 2
    assert "neither a run nor empty" in capsys.readouterr().err
    assert [p.name for p in Path("home").iterdir()] == ["letter.txt"]


def test_two_runs_in_one_folder_are_refused(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(FakeRunner(), "study=none", *TINY)
    folder = run_dir().resolve()
    with held(folder / ".lock", "process 123", print):
        assert command(FakeRunner(), f"run_dir={folder}") == 2
    error = capsys.readouterr().err
    assert "another run is writing there (process 123)" in error and error.count("\n") == 1


def test_a_corrupt_plan_is_one_line(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("r").mkdir()
    Path("r/study.json").write_text('{"arms": ')
    assert command(FakeRunner(), "run_dir=r") == 2
    error = capsys.readouterr().err
    assert "study.json: not readable as JSON" in error and error.count("\n") == 1


def test_a_record_without_measurements_opens_no_gpu_context_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lie beside every trial that follows."""
    asked: list[Any] = []
    monkeypatch.setattr(harness.block, "in_another_process", lambda ask: asked.append(ask) or {"from": "there"})
    for device in ("cpu", "cuda"):
        job = {"study": "s", "arm": device, "trial": 0, "seed": 1, "config": {"device": {"name": device}}}
        harness.block._record({**job, "out_dir": str(tmp_path / device)}, "failed", ["out of memory"])
    assert len(asked) == 1
    assert read_json(tmp_path / "cuda" / "run.json")["provenance"] == {"from": "there"}
    assert read_json(tmp_path / "cpu" / "run.json")["provenance"]["hardware"]["device"] == "cpu"


def test_an_arm_with_fewer_trials_is_left_out_of_later_blocks(command: Any) -> None:
    arms = 'study.arms={a:{set:[],trials:1},b:{set:["batching=static"],versus:a}}'
    runner = FakeRunner()
    assert command(runner, "study=none", arms, "study.trials=2", *TINY) == 0
    assert sorted(runner.ran) == [("a", 0), ("b", 0), ("b", 1)]
    assert pending_blocks(run_dir(), read_plan(run_dir())) == []


def test_one_trial_at_a_time_is_measured_on_a_device(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    measuring, measuring_elsewhere = threading.Event(), threading.Event()

    def another_study() -> None:
        with device_locks(["cpu"], Path("elsewhere/run"), print):
            measuring_elsewhere.set()
            measuring.set()
            time.sleep(1.0)
            measuring_elsewhere.clear()

    thread = threading.Thread(target=another_study)
    thread.start()
    measuring.wait()
    runner = FakeRunner(lambda job: "crash" if measuring_elsewhere.is_set() else "ok")
    assert command(runner, "study=none", *TINY) == 0
    thread.join()
    out = capsys.readouterr().out
    assert f"waiting: another trial is being measured on cpu (process {os.getpid()}, elsewhere/run)" in out


def test_progress_that_nobody_reads_does_not_end_a_study(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `| head`: the pipe breaks at the second line."""
    reader, writer = os.pipe()
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)

        def read_no_more(job: Mapping[str, Any]) -> str:
            if len(runner.jobs) == 1:
                os.close(reader)
            return "ok"

        runner = FakeRunner(read_no_more)
        assert command(runner, *SWEEP) == 0
    assert len(runner.ran) == 6 and pending_blocks(run_dir(), read_plan(run_dir())) == []
