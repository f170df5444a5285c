"""An option whose output is not the target's own says so in the record, and nobody compares its tokens."""

from __future__ import annotations

from pathlib import Path

from test_faults_trial import ARM, blocks

from harness.__main__ import main
from harness.equivalence import check_study
from harness.records import read_run
from harness.run_dir import read_plan
from harness.study import planned_configs

ARMS = (
    'study.arms={plain:{set:["decoding=autoregressive"]},exact:{set:["decoding=speculative"]},'
    'typical:{set:["decoding=speculative","decoding.acceptance=typical"]}}'
)


def test_typical_acceptance_is_labelled_and_its_tokens_are_not_compared(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    study = ["study.baseline=plain", "study.trials=1", "isolation=inline", f"run_dir={run_dir}"]
    command = [*ARM, ARMS, "precision=fp32", *study]
    assert main(command, launch=blocks, finish=lambda run_dir, plan: []) == 0
    plan = read_plan(run_dir)
    check_study(run_dir, planned_configs(plan), plan["baseline"])
    record = read_run(run_dir)
    runs = {arm: record.of_arm(arm)[0].run for arm in ("plain", "exact", "typical")}
    labels = {arm: [note for note in run["validity"] if note.startswith("not exact: ")] for arm, run in runs.items()}
    assert labels["plain"] == labels["exact"] == [] and len(labels["typical"]) == 1
    assert "typical acceptance" in labels["typical"][0]
    assert runs["exact"]["metrics"]["equivalence"] == 1.0
    assert "equivalence" not in runs["typical"] and runs["typical"]["metrics"].get("equivalence") is None
    assert runs["typical"]["emulated"] == []  # its speed is real
