"""What an arm takes to start has nothing of what the harness does meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from test_faults_trial import ARM

import harness.trial
from harness.arm import resolve_study
from harness.compose import compose_arm
from harness.records import read_trial
from harness.trial import run_trial


def test_the_harness_own_work_is_no_part_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly() -> dict[str, float]:
        time.sleep(0.5)
        return {"load_1m": 0.0, "cpu_percent": 0.0}

    monkeypatch.setattr(harness.trial, "host_load", slowly)
    monkeypatch.setattr("harness.warm_up.process_age_s", lambda: 100.0)
    config = resolve_study({"arm": compose_arm(ARM)})["arm"]
    assert run_trial(config, study="s", arm="arm", trial=1, seed=0, out_dir=tmp_path / "arm/1") == "ok"
    metrics = read_trial(tmp_path / "arm/1").run["metrics"]
    assert 90 < metrics["startup_s"] <= 99.5 and metrics["ready_s"] == metrics["startup_s"]
