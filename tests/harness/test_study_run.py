"""A study from command line to exit status, its trials made by a fake runner: blocks, resume, interruption."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import harness.block
from harness.__main__ import launch_blocks, main
from harness.block import device_lock, run_block
from harness.compose import quoted
from harness.isolate import Ending
from harness.lock import held
from harness.plan import trial_seed
from harness.records import SCHEMA_VERSION, read_json, write_trial
from harness.run_dir import blocks_due, pending_blocks, read_plan, statuses

TINY = ["model=tiny", "device=cpu", "attention=sdpa", "workload/prompts=random", "workload.num_requests=4"]
SWEEP = ["study=none", "batching=static,continuous", "study.trials=3", *TINY]


class FakeRunner:
    """Stands in for the child process: writes the record that ``behave`` asks for."""

    def __init__(
        self,
        behave: Callable[[Mapping[str, Any]], str] = lambda job: "ok",
        noise: Callable[[Mapping[str, Any]], float] = lambda job: 1.0,
    ) -> None:
        self.jobs: list[Mapping[str, Any]] = []
        self._behave, self._noise = behave, noise

    def __call__(self, job: Mapping[str, Any], *, stall_s: float, on_progress: Callable[..., None]) -> Ending:
        self.jobs.append(job)
        on_progress({"phase": "measuring", "steps": 1, "output_tokens": 2, "finished": 1, "requests": 4})
        behaviour = self._behave(job)
        if behaviour == "crash":
            return Ending("RuntimeError: out of memory")
        if behaviour == "die":
            raise SystemExit(9)  # the whole harness is killed
        run = record(job, "aborted" if behaviour == "interrupt" else behaviour)
        run["metrics"]["output_tokens_per_s"] *= self._noise(job)
        write_trial(Path(job["out_dir"]), run)
        return Ending(None, interrupted=behaviour == "interrupt")

    @property
    def ran(self) -> list[tuple[str, int]]:
        return [(job["arm"], job["trial"]) for job in self.jobs]


def record(job: Mapping[str, Any], status: str) -> dict[str, Any]:
    speed = {"static": 100.0, "continuous": 250.0}.get(job["arm"], 1.0)
    return {
        "schema_version": SCHEMA_VERSION,
        **{key: job[key] for key in ("study", "arm", "trial", "seed", "config")},
        "status": status,
        "reasons": [],
        "axes": {},
        "provenance": {},
        "window": {"start_s": 0.0, "end_s": 3.0, "rule": "burst"},
        "metrics": {"output_tokens_per_s": speed, "ttft_s": {"p50": 0.25}, "itl_s": {"p50": 0.01}, "startup_s": 1.0},
        "limits": {},
        "validity": [],
        "clock": "real",
        "emulated": [],
    }


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a command line in an empty folder with a fake runner; nothing is made of the records."""
    monkeypatch.chdir(tmp_path)

    def command(runner: FakeRunner, *arguments: str, through_hydra: bool = False) -> int:
        def directly(run_dir: Path, overrides: Sequence[str]) -> None:
            """As Hydra's sweeper and launcher, without their composition of every block."""
            launched: list[int] = []
            while blocks := [b for b in pending_blocks(run_dir, read_plan(run_dir)) if b not in launched]:
                launched += blocks
                for block in blocks:
                    run_block(run_dir, block, run_one=runner)

        def hydra_job(config: Any) -> None:
            run_block(Path(config.run_dir), int(config.block), run_one=runner)

        launch = functools.partial(launch_blocks, job=hydra_job) if through_hydra else directly
        return main(arguments, launch=launch, finish=lambda run_dir, plan: [])

    return command


def run_dir(study: str = "none") -> Path:
    return Path("results/runs") / study / "latest"


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


def test_a_model_file_that_changed_is_refused(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(FakeRunner(lambda job: "crash"), *SWEEP) == 1
    plan = json.loads((run_dir() / "study.json").read_text())
    plan["arms"]["static"]["fingerprints"]["model"] = "another file"
    (run_dir() / "study.json").write_text(json.dumps(plan))
    assert command(FakeRunner(), f"run_dir={run_dir().resolve()}") == 2
    assert "fingerprint" in (error := capsys.readouterr().err) and "start a new run" in error


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
        with device_lock("cpu", Path("elsewhere/run"), print):
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
