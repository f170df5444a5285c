"""A real study is killed, interrupted and started twice: what is recorded at its end is what nothing ever disturbed."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_study import COMMAND, TRIALS, WAIT_S, RealStudy, kill, leftovers, outcome, wait_for_lines

from harness.__main__ import main
from harness.block import run_block
from harness.run_dir import pending_blocks, read_plan, statuses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same study in this process, which nobody kills."""
    folder = tmp_path_factory.mktemp("u")

    def blocks(run_dir: Path, overrides: Any) -> None:
        for block in pending_blocks(run_dir, read_plan(run_dir)):
            run_block(run_dir, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        command = [*COMMAND, f"run_dir={folder / 'run'}"]
        assert main(command, launch=blocks, finish=lambda run_dir, plan: []) == 0
    return outcome(folder / "run")


@pytest.fixture
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStudy]:
    study = RealStudy(tmp_path_factory.mktemp("s"))
    with study.nothing_stays():
        yield study


def assert_ends_as_if_undisturbed(study: RealStudy, undisturbed: dict[str, Any]) -> None:
    _, errors = (last := study.start(*COMMAND)).communicate(timeout=WAIT_S)
    assert (last.returncode, errors) == (0, "")
    assert outcome(study.run_dir) == undisturbed
    assert len(undisturbed["trials"]) == TRIALS
    assert leftovers(study.run_dir) == []
    assert (study.run_dir / "report.html").is_file() and (study.run_dir / "summary.json").is_file()
    study.assert_no_process_is_left()


def assert_nothing_stays(study: RealStudy, *allowed: str | None) -> None:
    study.assert_no_process_is_left()
    assert set(statuses(study.run_dir, read_plan(study.run_dir)).values()) <= {"ok", None, *allowed}


def start_until_a_trial_runs(study: RealStudy, generator: np.random.Generator) -> subprocess.Popen[str]:
    """A study at a random moment of its first or second trial."""
    process = study.start(*COMMAND)
    wait_for_lines(process, "records:")
    wait_for_lines(process, "[", int(generator.integers(0, 2)))
    time.sleep(generator.uniform(0.0, 0.8))
    return process


@pytest.mark.slow
def test_kill_9_three_times(study: RealStudy, undisturbed: dict[str, Any]) -> None:
    """Each resumed study is killed again, at a random moment of one of the trials that are left."""
    generator = np.random.default_rng(5)
    for _ in range(3):
        kill(process := start_until_a_trial_runs(study, generator))
        assert process.returncode == -signal.SIGKILL
        assert_nothing_stays(study)
    assert_ends_as_if_undisturbed(study, undisturbed)


@pytest.mark.slow
def test_ctrl_c_once_and_twice(study: RealStudy, undisturbed: dict[str, Any]) -> None:
    generator = np.random.default_rng(6)
    for times in (1, 2):
        process = start_until_a_trial_runs(study, generator)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130
        assert errors == f"interrupted; resume with: python -m harness run_dir={study.run_dir}\n"
        assert_nothing_stays(study, "aborted")
    assert_ends_as_if_undisturbed(study, undisturbed)


@pytest.mark.slow
def test_two_started_at_once_in_one_folder(study: RealStudy, undisturbed: dict[str, Any]) -> None:
    """One of them runs the study; the other says so and touches nothing."""
    pair = [study.start(*COMMAND) for _ in range(2)]
    said = [process.communicate(timeout=WAIT_S) for process in pair]
    loser = next(i for i, process in enumerate(pair) if process.returncode == 2)
    assert said[loser][0] == "" and said[loser][1].count("\n") == 1
    assert f"run_dir={study.run_dir}: another run " in said[loser][1]
    assert (pair[1 - loser].returncode, said[1 - loser][1]) == (0, "")
    assert outcome(study.run_dir) == undisturbed and leftovers(study.run_dir) == []


@pytest.fixture(scope="module")
def whole_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What a study takes from its start to its report."""
    study, began = RealStudy(tmp_path_factory.mktemp("w")), time.monotonic()
    assert study.start(*COMMAND).wait(timeout=WAIT_S) == 0
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_kill_9_at_any_moment(study: RealStudy, undisturbed: dict[str, Any], whole_s: float, seed: int) -> None:
    """While it plans, measures, compares tokens or draws its report."""
    process = study.start(*COMMAND)
    time.sleep(np.random.default_rng(seed).uniform(0.0, whole_s))
    kill(process)
    study.assert_no_process_is_left()
    assert_ends_as_if_undisturbed(study, undisturbed)
