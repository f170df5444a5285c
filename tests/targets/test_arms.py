"""What `target=transformers` stands for, what it refuses, and that an arm of it is measured and compared like any."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from target_runs import CONTINUOUS, FOREIGN, STATIC, TINY, reasons, resolved

from harness.__main__ import main
from harness.metrics import compute_metrics
from harness.recorder import Recorder
from harness.records import TELEMETRY_SCHEMA, empty_frame, read_trial
from impls.request import Request, SamplingParams
from impls.seams import Emission, StepResult

pytest.importorskip("transformers")


@pytest.mark.parametrize("how", [STATIC, CONTINUOUS, (*CONTINUOUS, "prefix=hash_chain", "precision=bf16")], ids=str)
def test_what_it_stands_for(how: tuple[str, ...]) -> None:
    assert reasons(*how, *FOREIGN) == []
    assert resolved(*how, *FOREIGN)["attention"] == {"name": "transformers"}
    assert resolved(*how)["attention"]["name"] != "transformers"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ((*STATIC, "kv_cache=paged"), "kv_cache=paged: with batching=static this is generate"),
        ((*STATIC, "prefix=hash_chain"), "prefix=hash_chain"),
        ((*CONTINUOUS, "kv_cache=contiguous"), "kv_cache=contiguous: with batching=continuous this is its continuous"),
        ((*CONTINUOUS, "prefix=radix"), "prefix=off or hash_chain only"),
        ((*CONTINUOUS, "attention=sdpa"), "attention=auto only"),
        ((*CONTINUOUS, "execution=compiled"), "execution=eager only"),
        ((*CONTINUOUS, "decoding=speculative"), "decoding=autoregressive only"),
        ((*CONTINUOUS, "precision=int8"), "precision=fp32 or bf16 only"),
        ((*CONTINUOUS, "kv_dtype=bf16"), "kv_dtype: transformers keeps keys and values in its precision"),
        ((*CONTINUOUS, "kv_cache.block_size=2"), "no pages of fewer than 4 positions"),
        ((*CONTINUOUS, "batching.order=shortest_first"), "batching.order=shortest_first: transformers sees to it"),
        ((*CONTINUOUS, "batching.preemption=swap"), "allowed: recompute"),
        ((*CONTINUOUS, "batching.max_num_batched_tokens=64"), "must be at least max_model_len"),
        ((*STATIC, "batching.emit=never"), "must be one of step, batch_end"),
    ],
    ids=str,
)
def test_an_axis_that_it_would_ignore_is_refused(how: tuple[str, ...], said: str) -> None:
    found = reasons(*how, *FOREIGN)
    assert found and all("\n" not in reason for reason in found) and any(said in reason for reason in found)


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("impls.targets.transformers.version", missing)
    (reason,) = reasons(*STATIC, *FOREIGN)
    assert reason == (
        "target=transformers: needs the package transformers, at least 5.24: "
        "pip install 'llm-serving-harness[transformers]'"
    )
    monkeypatch.setattr("impls.targets.transformers.version", lambda name: "5.9.1")
    (reason,) = reasons(*STATIC, *FOREIGN)
    assert "needs transformers of at least 5.24, has 5.9.1" in reason


def test_a_target_that_shows_no_steps_has_latencies_and_a_window_and_null_for_the_rest() -> None:
    """By hand: a at 0 s, three tokens at 1, 1.5 and 2 s; b at 0.5 s, two at 1.5 and 3 s; c is rejected at once."""
    recorder = Recorder()
    recorder.submitted(Request("c", (1,), arrival_s=-1.0), -1.0)
    recorder.step(StepResult([Emission("c", (), -1.0, "rejected", "too long")]))
    recorder.submitted(Request("a", (1, 2, 3, 4), SamplingParams(max_tokens=3)), 0.0)
    recorder.submitted(Request("b", (1, 2), SamplingParams(max_tokens=2), arrival_s=0.5), 0.5)
    recorder.step(StepResult([Emission("a", (1,), 1.0)]))
    recorder.step(StepResult([Emission("a", (2,), 1.5), Emission("b", (3,), 1.5)]))
    recorder.step(StepResult([Emission("a", (4,), 2.0, "length")]))
    recorder.step(StepResult([Emission("b", (5,), 3.0, "length")]))
    window, metrics, _ = compute_metrics(
        recorder.requests(),
        recorder.steps(),
        empty_frame(TELEMETRY_SCHEMA),
        window_rule="burst",
        max_num_seqs=2,
        kv_layout="contiguous",
    )
    assert window == {"start_s": 0.0, "end_s": 3.0, "rule": "burst"}
    assert metrics["output_tokens_per_s"] == 5 / 3 and metrics["ttft_s"]["p50"] == 1.0
    assert metrics["itl_s"]["max"] == 1.5 and metrics["e2e_s"]["max"] == 2.5 and metrics["steps"] is None
    assert metrics["queueing_s"]["n"] == 0
    nothing = (
        *("slot_utilization", "slot_utilization_drain", "kv_utilization", "mfu", "mbu", "acceptance_rate"),
        *("tokens_per_step", "prefix_hit_rate_observed", "energy_j_per_output_token"),
    )
    assert {name: metrics[name] for name in nothing} == dict.fromkeys(nothing)
    assert set(metrics["kv_waste"].values()) == {None}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of both ways beside the engine, in one process: each of its own would import transformers again."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("HARNESS_LOCKS", str(folder))
        patch.chdir(folder)
        arms = {
            "engine_static": STATIC,
            "their_static": (*STATIC, *FOREIGN), "their_continuous": (*CONTINUOUS, *FOREIGN),
            "impossible": (*CONTINUOUS, *FOREIGN, "execution=compiled"),
        }  # fmt: skip
        arms_option = ",".join(f"{name}:{{set:{json.dumps(list(how))}}}" for name, how in arms.items())
        traffic = (
            *("workload/arrivals=burst", "workload/prompts=random", "workload/prompt_length=uniform"),
            *("workload.prompt_length.low=4", "workload.prompt_length.high=40", "workload/output_length=uniform"),
            *("workload.output_length.low=1", "workload.output_length.high=12", "workload.num_requests=7"),
        )
        where = ("device.threads=1", "isolation=inline", "run_dir=run")
        assert main([*TINY, *traffic, *where, f"study.arms={{{arms_option}}}"]) == 0
    return folder / "run"


def records(study: Path) -> dict[str, Any]:
    names = ("engine_static", "their_static", "their_continuous", "impossible")
    return {name: read_trial(study / name / "0") for name in names}


def test_all_ways_give_the_same_tokens_in_the_same_kind_of_record(study: Path) -> None:
    found = records(study)
    outputs = {
        name: {row.request_id: list(row.output_token_ids) for row in record.requests.itertuples()}
        for name, record in found.items()
        if name != "impossible"
    }
    assert all(tokens == outputs["engine_static"] for tokens in outputs.values()) and len(outputs["engine_static"]) == 7
    for name in ("their_static", "their_continuous"):
        run = found[name].run
        assert run["status"] == "ok" and run["metrics"]["equivalence"] == 1.0
        assert run["axes"]["target"] == run["axes"]["attention"] == "transformers"
        assert run["provenance"]["kernels"]["attention"] == "sdpa"
        for metric in ("output_tokens_per_s", "weights_bytes"):
            assert run["metrics"][metric] > 0, metric
        assert run["metrics"]["mfu"] is None and run["linear_stages"] is None
        # One emission a token, but on a busy machine two that lie ready are picked up together.
        rows = list(found[name].requests.itertuples())
        assert all(len(row.emission_times_s) == len(row.emission_tokens) for row in rows)
        assert [sum(row.emission_tokens) for row in rows] == [row.output_tokens for row in rows]
        assert sum(len(row.emission_times_s) for row in rows) > sum(row.output_tokens for row in rows) / 2
        assert run["metrics"]["weights_bytes"] == found["engine_static"].run["metrics"]["weights_bytes"]
    assert found["impossible"].run["status"] == "not_run"


def test_what_is_seen_of_the_inside_is_in_the_record_and_what_is_not_is_null(study: Path) -> None:
    found = records(study)
    static, continuous = found["their_static"], found["their_continuous"]
    assert len(static.steps) == len(found["engine_static"].steps) and static.run["metrics"]["kv_waste"]["internal"] > 0
    assert static.run["metrics"]["kv_waste"]["reserved_ahead"] == 0.0
    assert static.run["metrics"]["slot_utilization"] == found["engine_static"].run["metrics"]["slot_utilization"]
    assert continuous.steps.empty and continuous.run["metrics"]["kv_utilization"] is None
    assert continuous.requests["scheduled_s"].isna().all() and continuous.run["window"]["start_s"] is not None


def test_the_dashboard_shows_them_beside_ours(study: Path) -> None:
    page = (study / "report.html").read_text()
    assert "their_continuous" in page and "their_static" in page
    summary = json.loads((study / "summary.json").read_text())
    assert summary["arms"]["their_continuous"]["ratios"]["output_tokens_per_s"]["n"] == 1
    assert summary["arms"]["impossible"]["status"] == "not_run"
