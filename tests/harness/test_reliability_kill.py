"""A study is killed, interrupted and started twice: what is recorded at its end is what nothing ever disturbed."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from direct_study import run_study
from killed_study import end_of, start_study
from real_study import COMMAND, WAIT_S, RealStudy, kill, leftovers, outcome, wait_for_lines

from harness.run_dir import read_plan, statuses

CHANGED = ("study.trials=1", "workload.num_requests=4", "workload.output_length.value=6")
SHORT = [*(o for o in COMMAND if o.partition("=")[0] not in {c.partition("=")[0] for c in CHANGED}), *CHANGED]


@dataclass
class Undisturbed:
    """What a study has to show that nobody killed, how many writes it made and how long it took."""

    outcome: dict[str, Any]
    writes: int
    seconds: float


def undisturbed_study(folder: Path, *, with_report: bool) -> Undisturbed:
    began = time.monotonic()
    assert end_of(start_study(folder, SHORT, with_report=with_report)) == 0, (folder / "output").read_text()
    found = outcome(folder / "run")
    assert len(found["trials"]) == 2 and {trial[0] for trial in found["trials"].values()} == {"ok"}
    return Undisturbed(found, int((folder / "writes").read_text()), time.monotonic() - began)


@pytest.fixture(scope="module")
def without_report(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed_study(tmp_path_factory.mktemp("u"), with_report=False)


@pytest.fixture(scope="module")
def with_report(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed_study(tmp_path_factory.mktemp("r"), with_report=True)


def assert_resumes_as_if_undisturbed(folder: Path, undisturbed: Undisturbed, *, with_report: bool) -> None:
    status = end_of(start_study(folder, SHORT, with_report=with_report))
    assert status == 0, (folder / "output").read_text()
    assert outcome(folder / "run") == undisturbed.outcome
    assert leftovers(folder / "run") == []


def test_kill_9_at_three_writes_one_after_another(tmp_path: Path, without_report: Undisturbed) -> None:
    """Each resumed study is killed again, within its first dozen writes, so that none gets to its end. This seed
    strikes where the plan, a table and a record are half-written.
    """
    generator = np.random.default_rng(1366)
    assert without_report.writes > 12
    for _ in range(3):
        at = int(generator.integers(1, 13))
        assert end_of(start_study(tmp_path, SHORT, at=at)) == -signal.SIGKILL
    assert_resumes_as_if_undisturbed(tmp_path, without_report, with_report=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_kill_9_at_any_moment(tmp_path: Path, with_report: Undisturbed, seed: int) -> None:
    """While it plans, measures, compares tokens or draws its report: at one of its writes, or whenever it may be."""
    generator = np.random.default_rng(seed)
    if seed % 2:
        at = int(generator.integers(1, with_report.writes + 1))
        assert end_of(start_study(tmp_path, SHORT, at=at, with_report=True)) == -signal.SIGKILL
    else:
        process = start_study(tmp_path, SHORT, with_report=True)
        time.sleep(generator.uniform(0.0, with_report.seconds))
        process.kill()
        assert end_of(process) in (-signal.SIGKILL, 0)
    assert_resumes_as_if_undisturbed(tmp_path, with_report, with_report=True)
    assert (tmp_path / "run/report.html").is_file() and (tmp_path / "run/summary.json").is_file()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same study in this process, its trials in processes of their own, which nobody kills."""
    folder = tmp_path_factory.mktemp("i")
    assert run_study([*COMMAND, f"run_dir={folder / 'run'}"]) == 0
    return outcome(folder / "run")


@pytest.fixture
def study(tmp_path: Path) -> Iterator[RealStudy]:
    study = RealStudy(tmp_path)
    with study.nothing_stays():
        yield study


def assert_ends_as_if_undisturbed(study: RealStudy, undisturbed: dict[str, Any]) -> None:
    _, errors = (last := study.start(*COMMAND)).communicate(timeout=WAIT_S)
    assert (last.returncode, errors) == (0, "")
    assert outcome(study.run_dir) == undisturbed
    assert leftovers(study.run_dir) == []
    study.assert_no_process_is_left()


def start_until_a_trial_runs(study: RealStudy, generator: np.random.Generator) -> subprocess.Popen[str]:
    """A study at a random moment of its first or second trial."""
    process = study.start(*COMMAND)
    wait_for_lines(process, "records:")
    wait_for_lines(process, "[", int(generator.integers(0, 2)))
    time.sleep(generator.uniform(0.0, 0.8))
    return process


@pytest.mark.slow
def test_kill_9_of_a_command_takes_its_trial_along(study: RealStudy, undisturbed: dict[str, Any]) -> None:
    """As its user sees it: nothing runs on, and nothing half-written is there for the next one."""
    generator = np.random.default_rng(5)
    for _ in range(2):
        kill(process := start_until_a_trial_runs(study, generator))
        assert process.returncode == -signal.SIGKILL
        study.assert_no_process_is_left()
        assert set(statuses(study.run_dir, read_plan(study.run_dir)).values()) <= {"ok", None}
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
        study.assert_no_process_is_left()
        assert set(statuses(study.run_dir, read_plan(study.run_dir)).values()) <= {"ok", "aborted", None}
    assert_ends_as_if_undisturbed(study, undisturbed)


@pytest.mark.slow
def test_two_started_at_once_in_one_folder(study: RealStudy, undisturbed: dict[str, Any]) -> None:
    """One of them runs the study; the other says so and touches nothing."""
    pair = [study.start(*COMMAND) for _ in range(2)]
    said = [process.communicate(timeout=WAIT_S) for process in pair]
    assert sorted(process.returncode for process in pair) == [0, 2], said
    loser = next(i for i, process in enumerate(pair) if process.returncode == 2)
    assert said[loser][0] == "" and said[loser][1].count("\n") == 1
    assert f"run_dir={study.run_dir}: another run " in said[loser][1]
    assert f"(process {pair[1 - loser].pid})" in said[loser][1] or "has just started there" in said[loser][1]
    assert said[1 - loser][1] == ""
    assert outcome(study.run_dir) == undisturbed and leftovers(study.run_dir) == []
