"""Records and plans that are damaged, newer or hostile, and a full disk: one line, and nothing is thrown away."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_study_run import SWEEP, FakeRunner

import harness.block
import harness.run_dir
from harness.__main__ import launch_blocks, main
from harness.block import run_block
from harness.isolate import Ending
from harness.run_dir import pending_blocks, read_plan

RUN = Path("run")
VICTIM = RUN / "static" / "1"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A command line in an empty folder; its trials are made by a runner that is no process."""
    monkeypatch.chdir(tmp_path)

    def run(runner: FakeRunner, *arguments: str) -> int:
        def blocks(run_dir: Path, overrides: Any) -> None:
            for block in pending_blocks(run_dir, read_plan(run_dir)):
                run_block(run_dir, block, run_one=runner)

        return main([*arguments, f"run_dir={RUN}"], launch=blocks, finish=lambda run_dir, plan: [])

    return run


def newer(folder: Path) -> None:
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"schema_version": 2}))


def without_status(folder: Path) -> None:
    run = json.loads((folder / "run.json").read_text())
    del run["status"]
    (folder / "run.json").write_text(json.dumps(run))


def cut(name: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])

    return cut


DAMAGE: dict[str, Callable[[Path], None]] = {
    "schema_version 2 is newer than 1": newer,
    "missing status": without_status,
    "run.json: not readable as JSON": cut("run.json"),
    "steps.parquet: not readable as parquet": cut("steps.parquet"),
    "requests.parquet: not found": lambda folder: (folder / "requests.parquet").unlink(),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_a_record_that_cannot_be_read_stops_a_resumed_study(run: Any, capsys: Any, said: str) -> None:
    """It may be a newer version's, or all that is left of a long measurement: whoever runs the study decides."""
    assert run(FakeRunner(), *SWEEP) == 0
    DAMAGE[said](VICTIM)
    before = {path: path.read_bytes() for path in VICTIM.iterdir()}
    capsys.readouterr()
    runner = FakeRunner()
    assert run(runner) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
    assert f"remove {VICTIM.absolute()} to measure it again" in error
    assert runner.ran == [] and {path: path.read_bytes() for path in VICTIM.iterdir()} == before
    shutil.rmtree(VICTIM)
    assert run(runner) == 0
    assert runner.ran == [("static", 1)]


def arm_outside(plan: dict[str, Any]) -> None:
    plan["arms"] = {"../precious": plan["arms"]["static"]}
    plan["order"] = [["../precious"]]


def changed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda plan: plan.update(changes)


def drop_config(plan: dict[str, Any]) -> None:
    plan["arms"]["static"]["config"] = {}


PLANS: dict[str, Callable[[dict[str, Any]], None]] = {
    "arms.../precious: is no arm's name": arm_outside,
    "order: must be lists of the plan's arms": changed(order=[["../precious"]]),
    "arms: is list, must be dict": changed(arms=["static"]),
    "overrides: is NoneType, must be list": changed(overrides=None),
    "stall_s: is str, must be int | float": changed(stall_s="long"),
    "arms.static.config.kv_cache.budget_bytes: is NoneType, must be int": drop_config,
    "schema_version 9 is newer than 1": changed(schema_version=9),
}


@pytest.mark.parametrize("said", PLANS)
def test_a_plan_that_is_none_is_refused_before_anything_is_touched(run: Any, capsys: Any, said: str) -> None:
    precious = Path("precious/0/thesis.txt")
    precious.parent.mkdir(parents=True)
    precious.write_text("chapter one")
    assert run(FakeRunner(), *SWEEP) == 0
    plan = json.loads((RUN / "study.json").read_text())
    PLANS[said](plan)
    (RUN / "study.json").write_text(json.dumps(plan))
    capsys.readouterr()
    runner = FakeRunner()
    assert run(runner) == 2
    error = capsys.readouterr().err
    assert "study.json: " in error and said in error and error.count("\n") == 1
    assert runner.ran == [] and precious.read_text() == "chapter one"


def no_space(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device", "somewhere")


def test_a_disk_that_is_full_for_the_plan_is_one_line(run: Any, capsys: Any, monkeypatch: Any) -> None:
    runner = FakeRunner()
    with monkeypatch.context() as patch:
        patch.setattr(harness.run_dir, "write_json", no_space)
        assert run(runner, *SWEEP) == 2
    error = capsys.readouterr().err
    assert f"run_dir={RUN}: [Errno 28] No space left on device: 'somewhere'" in error and error.count("\n") == 1
    assert runner.ran == [] and [path.name for path in RUN.iterdir()] == [".lock"]
    assert run(runner, *SWEEP) == 0 and len(runner.ran) == 6


def test_a_disk_that_is_full_for_the_report_is_one_line(run: Any, capsys: Any) -> None:
    assert run(FakeRunner(), *SWEEP) == 0
    capsys.readouterr()
    assert main([f"run_dir={RUN}"], finish=no_space) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error and "what is recorded there is kept" in error and error.count("\n") == 1


def test_where_not_even_a_failure_can_be_recorded_the_study_ends_in_one_line(
    run: Any, capsys: Any, monkeypatch: Any
) -> None:
    tried: list[str] = []

    def crash(job: Any, **options: Any) -> Ending:
        tried.append(job["arm"])
        return Ending("OSError: [Errno 28] No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(harness.block, "run_isolated", crash)
        patch.setattr(harness.block, "write_trial", no_space)
        with pytest.raises(SystemExit) as ended:
            main([*SWEEP, f"run_dir={RUN}"], launch=launch_blocks, finish=lambda run_dir, plan: [])
    resume = f"resume with: python -m harness run_dir={RUN.absolute()}"
    assert ended.value.code == f"error: [Errno 28] No space left on device: 'somewhere'; {resume}"
    assert len(tried) == 1 and capsys.readouterr().err == ""
    runner = FakeRunner()
    assert run(runner) == 0 and len(runner.ran) == 6


def test_a_folder_that_cannot_be_made_is_one_line(run: Any, capsys: Any) -> None:
    Path("file").write_text("a file")
    runner = FakeRunner()
    cases = {"file/run": "Not a directory", "file": "is neither a run nor empty", "x" * 300: "File name too long"}
    for value, said in cases.items():
        assert main([*SWEEP, f"run_dir={value}"], finish=lambda run_dir, plan: []) == 2
        error = capsys.readouterr().err
        assert f"run_dir={value}: " in error and said in error and error.count("\n") == 1
    assert runner.ran == [] and Path("file").read_text() == "a file"
