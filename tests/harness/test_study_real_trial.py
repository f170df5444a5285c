"""Real trials in real child processes: a whole study on the tiny model, and Ctrl-C in the middle of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from direct_study import run_study

from harness.isolate import Ending, run_isolated
from harness.records import read_trial

TINY = [
    *("study=none", "model=tiny", "device=cpu", "device.threads=1", "attention=sdpa", "workload/prompts=random"),
    *("workload/arrivals=burst", "workload/prompt_length=uniform", "workload/output_length=constant"),
    *("precision=fp32", "kv_cache.budget=8192tokens"),
]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_trial_is_measured_in_a_child_and_recorded() -> None:
    arguments = [*TINY, "workload.num_requests=3", "workload.output_length.value=8", "run_dir=run"]
    assert run_study(arguments) == 0
    record = read_trial(Path("run/single/0"))
    assert record.run["status"] == "ok" and record.run["seed"] != 0
    assert list(record.requests["output_tokens"]) == [8, 8, 8]
    metrics = record.run["metrics"]
    assert metrics["output_tokens_per_s"] > 0 and metrics["startup_s"] > 0 and metrics["peak_memory_bytes"] > 100e6
    assert len(record.steps) >= 8


def test_ctrl_c_in_the_middle_leaves_a_whole_record_of_what_was_measured() -> None:
    arguments = [*TINY, "workload.num_requests=400", "workload.output_length.value=1000", "run_dir=run"]
    assert run_study(arguments, interrupted) == 130
    record = read_trial(Path("run/single/0"))
    assert record.run["status"] == "aborted"
    assert len(record.requests) == 400 and "aborted" in set(record.requests["finish_reason"])
    assert len(record.steps) > 0


def interrupted(job: Mapping[str, Any], *, stall_s: float, on_progress: Any) -> Ending:
    sent: list[bool] = []

    def interrupt(report: Mapping[str, Any]) -> None:
        if report["phase"] == "measuring" and report["steps"] > 0 and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    return run_isolated(job, stall_s=stall_s, on_progress=interrupt)
