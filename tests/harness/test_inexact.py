"""An option whose output is not the target's own says so in the record, and nobody compares its tokens."""

from __future__ import annotations

from pathlib import Path

from direct_study import run_study
from test_faults_trial import ARM

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
    assert run_study(command) == 0
    plan = read_plan(run_dir)
    check_study(run_dir, planned_configs(plan), plan["baseline"], {})
    record = read_run(run_dir)
    runs = {arm: record.of_arm(arm)[0].run for arm in ("plain", "exact", "typical")}
    labels = {arm: [note for note in run["validity"] if note.startswith("not exact: ")] for arm, run in runs.items()}
    assert labels["plain"] == labels["exact"] == [] and len(labels["typical"]) == 1
    assert "typical acceptance" in labels["typical"][0]
    assert runs["exact"]["metrics"]["equivalence"] == 1.0
    assert "equivalence" not in runs["typical"] and runs["typical"]["metrics"].get("equivalence") is None
    assert runs["typical"]["emulated"] == []  # its speed is real


def test_an_arm_is_compared_with_the_arm_below_it_where_traffic_differs_from_the_baselines(tmp_path: Path) -> None:
    arms = (
        'study.arms={one:{set:["workload.num_requests=1"]},one_again:{set:["workload.num_requests=1"]},'
        'two:{set:["workload.num_requests=2"]},'
        'two_drafted:{set:["workload.num_requests=2","decoding=speculative"],versus:two}}'
    )
    run_dir = tmp_path / "run"
    study = ["study.baseline=one", "study.trials=1", "isolation=inline", f"run_dir={run_dir}"]
    command = [*(option for option in ARM if "num_requests" not in option), arms, "precision=fp32", *study]
    assert run_study(command) == 0
    plan = read_plan(run_dir)
    check_study(run_dir, planned_configs(plan), plan["baseline"], {"two_drafted": "two"})
    record = read_run(run_dir)
    runs = {arm: record.of_arm(arm)[0].run for arm in plan["arms"]}
    assert {arm: run["equivalence"]["reference"] for arm, run in runs.items() if "equivalence" in run} == {
        "one_again": "one",
        "two_drafted": "two",  # and `two` itself has other traffic than the baseline
    }
    assert runs["two_drafted"]["equivalence"]["requests"] == 2
    assert runs["two_drafted"]["metrics"]["equivalence"] == 1.0
