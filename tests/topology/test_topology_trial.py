"""A whole trial over worker processes, from the command line to its record."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from topology_runs import ARM

from harness.__main__ import main
from harness.block import run_block
from harness.records import TrialRecord, read_trial
from harness.run_dir import pending_blocks, read_plan


def blocks(run_dir: Path, overrides: Any) -> None:
    for block in pending_blocks(run_dir, read_plan(run_dir)):
        run_block(run_dir, block)


def trial_of(folder: Path, *arguments: str) -> TrialRecord:
    assert main([*ARM, *arguments, f"run_dir={folder / 'run'}"], launch=blocks, finish=lambda run_dir, plan: []) == 0
    return read_trial(folder / "run/single/0")


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # not behind what is measured on this machine


@pytest.mark.parametrize(
    ("transfer", "route"),
    [
        ("shared_memory", "shared memory bandwidth"),
        pytest.param("distributed", "loopback bandwidth", marks=pytest.mark.slow),
    ],
)
def test_the_record_of_a_disaggregated_trial(tmp_path: Path, transfer: str, route: str) -> None:
    record = trial_of(tmp_path, "topology=disaggregated", f"topology.transfer={transfer}")
    run, metrics, requests, steps = record.run, record.run["metrics"], record.requests, record.steps
    assert run["axes"]["topology"] == "disaggregated"
    assert (requests["finish_reason"] == "length").all() and (requests["output_tokens"] == 12).all()
    block_bytes = 2 * 2 * 16 * 2 * 16 * 2  # layers, k and v, positions, K/V heads, head_dim, BF16
    assert (requests["kv_transfer_bytes"] == 3 * block_bytes).all() and (requests["kv_transfer_s"] > 0).all()
    assert metrics["kv_transfer_bytes"] == 8 * 3 * block_bytes
    assert metrics["kv_transfer_s"] == pytest.approx(requests["kv_transfer_s"].sum())
    assert set(steps["worker"]) == {"prefill0", "decode0"}
    prefill, decode = (steps[steps["worker"] == name] for name in ("prefill0", "decode0"))
    assert prefill["prefill_tokens"].sum() == 8 * 40 and decode["decode_tokens"].sum() == 8 * 11
    assert (prefill["kv_reserved_ahead_tokens"] == 0).all() and (prefill["kv_used_tokens"] % 40 == 0).all()
    assert prefill["kv_capacity_tokens"].iloc[0] * 3 == decode["kv_capacity_tokens"].iloc[0]
    assert metrics["slot_utilization"] is None and metrics["goodput_per_s"] > 0
    assert metrics["peak_memory_bytes"] > 3 * 100e6  # this process and two more, each with torch in it
    assert metrics["startup_s"] > 0 and metrics["mfu"] > 0 and run["linear_stages"]
    assert [note for note in run["validity"] if note.startswith(f"{route}: ")]
    assert (requests["submitted_s"] - requests["intended_s"]).median() < 0.05  # nobody waits for the router


def test_the_record_of_replicas(tmp_path: Path) -> None:
    record = trial_of(tmp_path, "topology=replicas", "isolation=inline", "kv_cache=contiguous")
    metrics, steps = record.run["metrics"], record.steps
    assert set(steps["worker"]) == {"replica0", "replica1"}
    for worker in ("replica0", "replica1"):  # in turn: half of the requests each
        assert steps.loc[steps["worker"] == worker, "prefill_tokens"].sum() == 4 * 40
    assert metrics["kv_transfer_bytes"] is None and record.requests["kv_transfer_s"].isna().all()
    assert 0.5 < metrics["slot_utilization_drain"] <= 1  # of each replica's own rows
    assert metrics["weights_bytes"] > 0 and not [n for n in record.run["validity"] if "shared memory" in n]
