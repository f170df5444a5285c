"""The worst that can happen to worker processes: all die at once, their driver dies, one stands still but lives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from topology_bodies import stop_a_worker
from topology_runs import ARM, Run, config_of, gone, requests_of, run, shared_memory, target_of

from harness.__main__ import main
from harness.block import run_block
from harness.isolate import run_isolated
from harness.records import read_trial
from harness.run_dir import pending_blocks, read_plan

HERE = Path(__file__).parent
PAIR = "topology=disaggregated"
STARTING_S = 300.0  # several processes that import torch, on whatever machine


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [(PAIR,), (PAIR, "topology.transfer=distributed"), ("topology=replicas",)],
    ids=["shared memory", "distributed", "replicas"],
)
def test_all_workers_killed_at_once_fail_every_request_by_name(overrides: tuple[str, ...]) -> None:
    before = shared_memory()
    target = target_of(config_of(*overrides))
    pids = target.pid_of
    killed: list[int] = []

    def kill(so_far: Run) -> None:
        if not killed and sum(map(len, so_far.tokens.values())) >= 20:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            killed.extend(pids.values())

    try:
        found = run(target, requests_of(20, output=40), kill)
        assert killed and len(found.ends) == 20 and set(found.ends.values()) <= {"error", "length"}
        assert set(found.errors.values()) <= {f"worker {name} died (SIGKILL)" for name in pids}
        assert dict(target.deaths) == dict.fromkeys(pids, "died (SIGKILL)")
        late = run(target, requests_of(1, seed=9))
        assert late.ends == {"r0": "error"} and "no worker is left for it" in late.errors["r0"]
    finally:
        target.close()
    assert gone(pids) and shared_memory() <= before


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shared_memory", "distributed"])
def test_a_driver_that_is_killed_leaves_no_process_and_no_shared_memory(tmp_path: Path, transfer: str) -> None:
    before = shared_memory()
    arm = (PAIR, f"topology.transfer={transfer}", "topology.decode.workers=2")
    command = [sys.executable, HERE / "driven_workers.py", tmp_path / "pids.json", *arm]
    root = str(HERE.parents[1])
    driver = subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)})
    try:
        began = time.monotonic()
        while not (tmp_path / "pids.json").exists():
            assert driver.poll() is None, "the driver ended by itself"
            assert time.monotonic() - began < STARTING_S, "no worker makes a token"
            time.sleep(0.1)
        workers: dict[str, int] = json.loads((tmp_path / "pids.json").read_text())
        assert workers.keys() == {"prefill0", "decode0", "decode1"}
        all_of_it = {str(child.pid): child.pid for child in psutil.Process(driver.pid).children(recursive=True)}
        assert set(workers.values()) < set(all_of_it.values()), "the server that they were forked from is one more"
    finally:
        driver.kill()
        driver.wait()
    assert gone(all_of_it)
    assert shared_memory() <= before


def blocks(run_dir: Path, overrides: Any) -> None:
    for block in pending_blocks(run_dir, read_plan(run_dir)):
        run_block(run_dir, block, run_one=partial(run_isolated, target=stop_a_worker))


@pytest.mark.slow
def test_a_worker_that_stands_still_is_a_hang_and_is_killed_with_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears nothing, not even that its router has gone: it ends with the process group of the trial."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = shared_memory()
    arms = 'study.arms={stuck:{set:["topology=disaggregated"]},well:{set:["topology=disaggregated"]}}'
    command = [*ARM, arms, "study.stall_s=60", f"run_dir={tmp_path / 'run'}"]
    assert main(command, launch=blocks, finish=lambda run_dir, plan: []) == 1
    (reason,) = read_trial(tmp_path / "run/stuck/0").run["reasons"]
    assert reason.startswith("hang: no step for 60 s (study.stall_s) while measuring, after ")
    assert read_trial(tmp_path / "run/well/0").run["status"] == "ok"
    assert gone(json.loads((tmp_path / "workers.json").read_text()))
    assert shared_memory() <= before
