"""Real trials in real child processes: a whole study on the tiny model, and Ctrl-C in the middle of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.__main__ import main
from harness.block import run_block
from harness.isolate import Ending, run_isolated
from harness.records import read_trial
from harness.run_dir import pending_blocks, read_plan

TINY = [
    *("study=none", "model=tiny", "device=cpu", "device.threads=1", "attention=sdpa", "workload/prompts=random"),
    *("workload/arrivals=burst", "workload/prompt_length=uniform", "workload/output_length=constant"),
]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_trial_is_measured_in_a_child_and_recorded() -> None:
    arguments = [*TINY, "workload.num_requests=3", "workload.output_length.value=8", "run_dir=run"]
    assert main(arguments, launch=_blocks, finish=lambda run_dir, plan: []) == 0
    record = read_trial(Path("run/single/0"))
    assert record.run["status"] == "ok" and record.run["seed"] != 0
    assert list(record.requests["output_tokens"]) == [8, 8, 8]
    assert record.run["metrics"]["output_tokens_per_s"] > 0
    assert len(record.steps) >= 8


def test_ctrl_c_in_the_middle_leaves_a_whole_record_of_what_was_measured() -> None:
    arguments = [*TINY, "workload.num_requests=400", "workload.output_length.value=1000", "run_dir=run"]
    assert main(arguments, launch=_interrupted_blocks, finish=lambda run_dir, plan: []) == 130
    record = read_trial(Path("run/single/0"))
    assert record.run["status"] == "aborted"
    assert len(record.requests) == 400 and "aborted" in set(record.requests["finish_reason"])
    assert len(record.steps) > 0


def _blocks(run_dir: Path, overrides: Any) -> None:
    for block in pending_blocks(run_dir, read_plan(run_dir)):
        run_block(run_dir, block)


def _interrupted_blocks(run_dir: Path, overrides: Any) -> None:
    def run_one(job: Mapping[str, Any], *, stall_s: float, on_progress: Any) -> Ending:
        sent: list[bool] = []

        def interrupt(report: Mapping[str, Any]) -> None:
            if report["phase"] == "measuring" and report["steps"] > 0 and not sent:
                sent.append(True)
                os.kill(os.getpid(), signal.SIGINT)

        return run_isolated(job, stall_s=stall_s, on_progress=interrupt)

    run_block(run_dir, 0, run_one=run_one)
