"""A small study as its user runs it, in processes of their own: started, killed, resumed, compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from harness.records import read_json, read_run

ROOT = Path(__file__).parents[2]
MARK = "RELIABILITY_TEST"  # in the environment of every process of a study
# FP32 and greedy: the same tokens whoever shared a batch, so two runs can be compared word by word.
COMMAND = [
    *("study=none", "batching=static,continuous", "study.trials=2", "model=tiny", "precision=fp32"),
    *("device=cpu", "device.threads=1", "attention=sdpa", "model.max_model_len=256", "kv_cache.budget=2048tokens"),
    *("batching.max_num_seqs=4", "batching.max_num_batched_tokens=256", "workload.num_requests=8"),
    *("workload/arrivals=burst", "workload/prompts=random", "workload/prompt_length=uniform"),
    *("workload.prompt_length.low=4", "workload.prompt_length.high=40", "workload/output_length=constant"),
    "workload.output_length.value=48",
]
WAIT_S = 300.0  # on a machine that is busy with other things; a failure costs this once


class RealStudy:
    """One run folder and whatever processes worked on it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self._tmp = folder / "tmp"
        self._tmp.mkdir()
        self._mark = uuid.uuid4().hex

    def start(self, *options: str) -> subprocess.Popen[str]:
        """In a process group of its own, as a shell does; a killed one's temporary files stay in this folder."""
        settings = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self._tmp), MARK: self._mark, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "harness", f"run_dir={self.run_dir}", *options],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def survivors(self) -> list[psutil.Process]:
        """Processes of this study that still run."""
        return [process for process in psutil.process_iter() if _mark_of(process) == self._mark]

    def assert_no_process_is_left(self) -> None:
        deadline = time.monotonic() + WAIT_S  # a server that is still importing notices afterwards
        while left := self.survivors():
            assert time.monotonic() < deadline, [process.cmdline() for process in left]
            time.sleep(0.05)

    @contextmanager
    def nothing_stays(self) -> Iterator[None]:
        try:
            yield
        finally:
            for process in self.survivors():
                process.kill()


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except psutil.Error:  # it has ended, or it is not ours
        return None


def wait_for_lines(process: subprocess.Popen[str], start: str, count: int = 1) -> None:
    """Return once ``count`` lines of its output began like this, or it has ended."""
    assert process.stdout is not None
    while count and (line := process.stdout.readline()):
        count -= line.startswith(start)


def kill(process: subprocess.Popen[str]) -> None:
    """-9, and only the process that the user sees."""
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WAIT_S)


def outcome(run_dir: Path) -> dict[str, Any]:
    """What a run has to show: its plan, and of each trial everything that does not depend on the clock."""
    record = read_run(run_dir)
    columns = ["request_id", "prompt_tokens", "output_tokens", "finish_reason"]
    trials = {
        f"{trial.run['arm']}/{trial.run['trial']}": (
            *(trial.run[key] for key in ("status", "seed", "config")),
            trial.requests[columns].to_dict("records"),
            [list(ids) for ids in trial.requests["output_token_ids"]],
        )
        for trial in record.trials
    }
    plan = read_json(run_dir / "study.json")
    return {"plan": {key: value for key, value in plan.items() if key != "created"}, "trials": trials}


def leftovers(run_dir: Path) -> list[Path]:
    """What lies in a run's folder and is neither a record nor made of them."""
    known = {"study.json", "summary.json", "report.html", ".lock"}
    beside = [path for path in run_dir.iterdir() if path.is_file() and path.name not in known]
    return beside + [path for path in run_dir.glob("*/*") if not path.name.isdecimal()]
