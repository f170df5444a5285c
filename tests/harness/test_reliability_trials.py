"""What befalls one trial fails that trial, in one line; the study goes on, and a resumed one makes up for it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from direct_study import run_study
from real_study import COMMAND, leftovers
from reliability_bodies import DISK_BYTES, hang_in_static, suffer

import harness.trial
from harness.child import measure
from harness.isolate import run_isolated
from harness.observe import LEAD_S
from harness.records import read_run, read_trial
from harness.warm_up import process_age_s

ARM = [option for option in COMMAND if not option.startswith(("batching=", "kv_cache.budget=", "study.trials="))]
BUDGETS = {"memory": "256MiB", "disk": "2048tokens", "clock": "2048tokens", "well": "2048tokens"}


def with_budgets(*names: str) -> str:
    arms = ",".join(f'{name}:{{set:["kv_cache.budget={BUDGETS[name]}"]}}' for name in names)
    return f"study.arms={{{arms}}}"


def run(folder: Path, target: Any, *arguments: str) -> int:
    return run_study([*arguments, f"run_dir={folder / 'run'}"], partial(run_isolated, target=target))


def run_inline(folder: Path, *arguments: str) -> int:
    """In this process."""
    return run_study([*arguments, "isolation=inline", f"run_dir={folder / 'run'}"])


@pytest.fixture(scope="module")
def suffered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of which one arm has a full disk and one a clock that jumps."""
    folder = tmp_path_factory.mktemp("t")
    assert run(folder, suffer, *ARM, with_budgets("disk", "clock", "well")) == 1
    return folder


@pytest.mark.slow
def test_a_trial_that_runs_out_of_memory_fails_alone(tmp_path: Path) -> None:
    assert run(tmp_path, suffer, *ARM, with_budgets("memory", "well")) == 1
    failed = read_trial(tmp_path / "run/memory/0").run
    (reason,) = failed["reasons"]
    assert failed["status"] == "failed" and "memory" in reason and "\n" not in reason
    assert read_trial(tmp_path / "run/well/0").run["status"] == "ok"


def test_a_full_disk_fails_the_trial_and_leaves_nothing_half_written(suffered: Path) -> None:
    failed = read_trial(suffered / "run/disk/0")
    (reason,) = failed.run["reasons"]
    assert failed.run["status"] == "failed" and "File too large" in reason and "\n" not in reason
    assert failed.requests.empty and failed.steps.empty and failed.run["metrics"] == {}
    assert leftovers(suffered / "run") == []
    assert max(path.stat().st_size for path in (suffered / "run/well/0").iterdir()) > DISK_BYTES


def test_no_recorded_duration_follows_a_wall_clock_that_jumps(suffered: Path) -> None:
    record = read_trial(suffered / "run/clock/0")
    assert record.run["status"] == "ok"
    assert 0 < record.run["metrics"]["startup_s"] < 60
    assert 0 <= record.run["window"]["start_s"] < record.run["window"]["end_s"] < 60
    for frame, first in ((record.requests, 0.0), (record.steps, 0.0), (record.telemetry, -2 * LEAD_S)):
        times = frame[[name for name in frame if name.endswith("_s") and name != "emission_times_s"]]
        assert (times.isna() | ((times >= first) & (times < 60))).all(axis=None)
    assert all(0 <= t < 60 for times in record.requests["emission_times_s"] for t in times)


def test_a_resumed_study_makes_up_for_what_failed(suffered: Path, tmp_path: Path) -> None:
    shutil.copytree(suffered / "run", tmp_path / "run")
    assert run(tmp_path, measure) == 0
    record = read_run(tmp_path / "run")
    assert [(t.run["arm"], t.run["status"]) for t in record.trials] == [(arm, "ok") for arm in record.plan["arms"]]
    for kept in ("clock/0/run.json", "well/0/run.json"):
        assert (tmp_path / "run" / kept).read_bytes() == (suffered / "run" / kept).read_bytes()


CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.19 GiB is "
    "free. Including non-PyTorch memory, this process has 77.96 GiB memory in use.\nSee documentation for more"
)


def out_of_cuda_memory() -> None:
    raise torch.cuda.OutOfMemoryError(CUDA_SAYS)


# By the sequences of its arm: what runs out at which call of the executor. The first is in the warm-up, the others are
# in the window.
OUT_OF_MEMORY: dict[int, tuple[int, Callable[[], Any]]] = {
    2: (1, out_of_cuda_memory),
    3: (60, lambda: torch.empty(1 << 55, dtype=torch.int8)),
    4: (60, lambda: np.empty(1 << 55, np.int8)),
}


def test_an_arm_that_is_out_of_memory_says_what_was_asked_and_free_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_target = harness.trial.build_target

    def with_little_memory(config: Any, *arguments: Any) -> Any:
        engine = build_target(config, *arguments)
        execute, calls = engine.executor.execute, itertools.count(1)
        at, allocate = OUT_OF_MEMORY.get(config["batching"]["max_num_seqs"], (0, lambda: None))

        def allocating(batch: Any) -> Any:
            if next(calls) == at:
                allocate()
            return execute(batch)

        engine.executor.execute = allocating
        return engine

    monkeypatch.setattr(harness.trial, "build_target", with_little_memory)
    sizes = [*OUT_OF_MEMORY, 5]
    arms = ",".join(f'seqs_{n}:{{set:["batching.max_num_seqs={n}"]}}' for n in sizes)
    given = [option for option in ARM if not option.startswith("batching.max_num_seqs")]
    assert run_inline(tmp_path, *given, "kv_cache.budget=2048tokens", f"study.arms={{{arms}}}") == 1
    assert capsys.readouterr().err == ""
    records = {n: read_trial(tmp_path / f"run/seqs_{n}/0") for n in sizes}
    assert [records[n].run["status"] for n in sizes] == ["failed"] * 3 + ["ok"]
    reasons = {n: records[n].run["reasons"] for n in OUT_OF_MEMORY}
    assert all(len(whys) == 1 and "\n" not in whys[0] for whys in reasons.values())
    assert reasons[2][0].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.")
    assert "of which 1.19 GiB is free" in reasons[2][0]
    assert "you tried to allocate 36028797018963968 bytes" in reasons[3][0]
    assert "Unable to allocate 32.0 PiB" in reasons[4][0]
    for n in (3, 4):
        assert re.search(r"\(the host has \d+\.\d of \d+\.\d GB free\)$", reasons[n][0])
    assert len(records[5].requests) == 8


@pytest.mark.slow
def test_a_trial_that_hangs_is_recorded_and_the_study_goes_on(tmp_path: Path) -> None:
    began = time.monotonic()
    assert run(tmp_path, hang_in_static, *ARM, "batching=static,continuous", "study.stall_s=1") == 1
    hung, next_one = (read_trial(tmp_path / f"run/{arm}/0").run for arm in ("static", "continuous"))
    assert hung["status"] == "failed"
    assert hung["reasons"] == ["hang: no step for 1 s (study.stall_s) while measuring, after 3 steps; killed"]
    assert next_one["status"] == "ok" and time.monotonic() - began < 30


def test_a_request_that_can_never_fit_is_rejected_and_the_others_go_on(tmp_path: Path) -> None:
    """One is longer than the model's length, one than the whole cache (128 tokens in FP32)."""
    trace = tmp_path / "trace.jsonl"
    lengths = [(8, 4), (300, 4), (200, 4), (9, 4)]
    trace.write_text("\n".join(json.dumps({"input_length": i, "output_length": o}) for i, o in lengths))
    traffic = ["workload=trace", f"workload.path={trace}"]
    given = [option for option in ARM if not option.startswith("workload")]
    assert run_inline(tmp_path, *given, *traffic, "kv_cache.budget=256tokens") == 0
    record = read_trial(tmp_path / "run/single/0")
    assert record.run["status"] == "ok" and record.run["metrics"]["n_rejected"] == 2
    assert list(record.requests["finish_reason"]) == ["length", "rejected", "rejected", "length"]
    too_long, too_large = record.requests["error"][1:3]
    assert too_long.endswith("= 304 tokens, max_model_len is 256")
    assert too_large.endswith("= 204 tokens, the whole KV cache holds 128")
    assert list(record.requests["output_tokens"]) == [4, 0, 0, 4]


def test_the_age_of_a_process_is_told_by_no_clock_that_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    by_wall_clock = time.time() - psutil.Process().create_time()
    assert process_age_s() == pytest.approx(by_wall_clock, abs=1.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert process_age_s() == pytest.approx(by_wall_clock, abs=2.0)


def test_the_wall_clock_tells_start_times_and_nothing_else() -> None:
    """A new use of it has to be looked at, and written down here."""
    root = Path(__file__).parents[2]
    wall = ("time.time()", "time_ns()", "datetime.now(", "datetime.utcnow(", ".today()")
    found = {
        f"{path.relative_to(root)}": count
        for room in ("harness", "impls", "workloads", "hydra_plugins")
        for path in sorted((root / room).rglob("*.py"))
        if (count := sum(path.read_text("utf-8").count(call) for call in wall))
    }
    assert found == {
        "harness/probe.py": 2,  # when a peak was measured that is kept for later trials, and how long ago that is
        "harness/provenance.py": 1,  # a trial's start time
        "harness/run_dir.py": 1,  # a run folder's name
        "harness/study.py": 1,  # a plan's start time
        "harness/warm_up.py": 1,  # a process's age, on systems that tell its start by the wall clock alone
        "impls/models/source.py": 1,  # whether a file was written so lately that its times could stay as they are
    }
