"""Records and plans that are damaged, newer or hostile, and a full disk: one line, and nothing is thrown away."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from direct_study import run_study
from fake_study import SWEEP, FakeRunner

import harness.block
import harness.run_dir
from harness.__main__ import launch_blocks, main
from harness.isolate import Ending
from harness.records import RecordError

RUN = Path("run")
VICTIM = RUN / "static" / "1"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A command line in an empty folder; its trials are made by a runner that is no process."""
    monkeypatch.chdir(tmp_path)

    def run(runner: FakeRunner, *arguments: str) -> int:
        return run_study([*arguments, f"run_dir={RUN}"], runner)

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


def of_another_trial(folder: Path) -> None:
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"trial": 0}))


def edited(*place: str, to: Any) -> Callable[[Path], None]:
    """By hand, deep in run.json."""

    def edit(folder: Path) -> None:
        run = json.loads((folder / "run.json").read_text())
        part = run
        for name in place[:-1]:
            part = part.setdefault(name, {})
        part[place[-1]] = to
        (folder / "run.json").write_text(json.dumps(run))

    return edit


DAMAGE: dict[str, Callable[[Path], None]] = {
    "run.json: metrics.ttft_s is int, expected dict": edited("metrics", "ttft_s", to=7),
    "run.json: metrics.output_tokens_per_s is str, expected a number": edited("metrics", "output_tokens_per_s", to="x"),
    "run.json: provenance.host_before.load_1m is dict": edited("provenance", "host_before", "load_1m", to={}),
    "run.json: config.slo.ttft_s is list, expected a number or null": edited("config", "slo", "ttft_s", to=[]),
    "run.json: profile is missing steps, window_s, operators": edited("profile", to={}),
    "run.json: reasons[0] is NoneType, expected str": edited("reasons", to=[None]),
    "run.json: seed is float, expected int": edited("seed", to=0.5),
    "schema_version 2 is newer than 1": newer,
    "missing status": without_status,
    "run.json: is the record of static/0, which is not its folder": of_another_trial,
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


def of_the_arm(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda plan: plan["arms"]["static"].update(changes)


PLANS: dict[str, Callable[[dict[str, Any]], None]] = {
    "arms.../precious: is no arm's name": arm_outside,
    "order: must be lists of the plan's arms": changed(order=[["../precious"]]),
    "arms is list, expected dict": changed(arms=["static"]),
    "overrides is NoneType, expected list": changed(overrides=None),
    "stall_s is str, expected a number": changed(stall_s="long"),
    "arms.static.config is missing kv_cache": drop_config,
    "schema_version 9 is newer than 1": changed(schema_version=9),
    "half_width is str, expected a number": changed(half_width="narrow"),
    "order[0] is str, expected list": changed(order=["static"]),
    "arms.static is NoneType, expected dict": changed(arms={"static": None}),
    "arms.static.config.kv_cache.budget_bytes is bool, expected int": lambda plan: plan["arms"]["static"]["config"][
        "kv_cache"
    ].update(budget_bytes=True),
    "baseline: nobody is none of the plan's arms": changed(baseline="nobody"),
    "arms.static.versus: nobody is none of the plan's arms": of_the_arm(versus="nobody"),
    "arms.static.fingerprints is list, expected dict": of_the_arm(fingerprints=[]),
    "arms.static.overrides[0] is int, expected str": of_the_arm(overrides=[1]),
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


def test_a_table_that_proves_to_be_corrupt_at_the_end_is_one_line(run: Any, capsys: Any) -> None:
    assert run(FakeRunner(), *SWEEP) == 0
    capsys.readouterr()

    def finish(run_dir: Path, plan: Any) -> list[Path]:
        raise RecordError(f"{run_dir / 'static/0/requests.parquet'}: not readable as parquet")

    assert main([f"run_dir={RUN}"], finish=finish) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "requests.parquet: not readable" in error and error.count("\n") == 1


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
