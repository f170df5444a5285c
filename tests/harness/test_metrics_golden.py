"""Every metric against numbers worked out by hand from scripted times, with zero tolerance."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from golden import contiguous_burst, play, timed_mixture

from harness.limits import Peaks, StepCost
from harness.metrics import GIVEN_METRICS, compute_metrics
from harness.records import TELEMETRY_SCHEMA, empty_frame, frame

inf = math.inf
NO_TELEMETRY = empty_frame(TELEMETRY_SCHEMA)


def spread(mean: Any, p50: Any, p90: Any, p95: Any, p99: Any, most: Any, n: int) -> dict[str, Any]:
    return {"mean": mean, "p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": most, "n": n}


@pytest.fixture(scope="module")
def burst() -> dict[str, Any]:
    recorder = play(*contiguous_burst())
    steps = recorder.steps(lambda stats: StepCost(10 * sum(stats.query_lens), 100))
    telemetry = frame(
        {
            "t_s": [0.0, 0.0, 0.0, 2.0, 4.0, 4.0],
            "source": ["gpu0", "gpu1", "process", "gpu0", "gpu0", "gpu1"],
            "name": ["energy_j", "energy_j", "energy_j", "energy_j", "energy_j", "energy_j"],
            "value": [100.0, 0.0, 7.0, 120.0, 140.0, 8.0],
            "unit": ["J"] * 6,
        },
        TELEMETRY_SCHEMA,
    )
    window, metrics, warnings = compute_metrics(
        recorder.requests(),
        steps,
        telemetry,
        window_rule="burst",
        max_num_seqs=2,
        kv_layout="contiguous",
        slo={"name": "test", "ttft_s": 2.0, "tpot_s": None},
        price_per_hour=3.6,
        extras={"peaks": Peaks(100.0, 1000.0, "datasheet"), "weights_bytes": 1234, "perplexity": 17.5},
    )
    return {"window": window, "metrics": metrics, "warnings": warnings, "steps": steps, "requests": recorder.requests()}


def test_burst_window_is_first_scheduled_step_to_last_token(burst: dict[str, Any]) -> None:
    assert burst["window"] == {"start_s": 0.0, "end_s": 3.0, "rule": "burst"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_tokens_per_s", 2.0),  # 6 tokens in 3 s
        ("requests_per_s", 1.0),
        ("goodput_per_s", 2 / 3),  # a and b within 2 s
        ("slo_attainment", 2 / 3),
        ("n_requests", 3),
        ("n_finished", 3),
        ("n_failed", 0),
        ("n_rejected", 0),
        ("output_tokens", 6),
        ("steps", 4),
        ("slot_utilization", 5 / 6),  # 2 + 2 + 1 of 2 rows in the three steps in which c waits
        ("slot_utilization_drain", 1 / 2),
        ("kv_utilization", 16 / 96),  # 6*1 + 8*.5 + 6*.5 + 3*1 of 40*1 + 40*.5 + 40*.5 + 16*1
        ("kv_waste", {"internal": 60.5 / 96, "reserved_ahead": 3.5 / 96, "unusable": 16 / 96}),
        ("acceptance_rate", None),
        ("tokens_per_step", 1.0),  # of one sequence: 6 tokens in 2 + 2 + 1 + 1 rows
        ("prefix_hit_rate_planned", 0.0),
        ("prefix_hit_rate_observed", None),
        ("preemptions", 0),
        ("distinct_4gram_share", None),
        ("mfu", 130 / 300),  # 13 rows of 10 FLOPs
        ("mbu", 400 / 3000),
        ("energy_j_per_output_token", (30 + 6) / 6),  # two GPUs; at 3 s the counters stand at 130 and 6
        ("cost_per_million_output_tokens", 600.0),  # 5 good tokens in 3 s: 6,000 an hour for 3.6
        ("weights_bytes", 1234),
        ("perplexity", 17.5),
        ("startup_s", None),
        ("ttft_s", spread(5 / 3, 1.0, 3.0, 3.0, 3.0, 3.0, 3)),
        ("itl_s", spread(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 3)),
        ("inter_emission_s", spread(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 3)),
        ("tpot_s", spread(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 2)),  # c has one token: undefined
        ("e2e_s", spread(6.5 / 3, 2.0, 3.0, 3.0, 3.0, 3.0, 3)),
        ("normalized_latency_s", spread(math.fsum([2 / 3, 0.75, 3.0]) / 3, 0.75, 3.0, 3.0, 3.0, 3.0, 3)),
        ("queueing_s", spread(2 / 3, 0.0, 2.0, 2.0, 2.0, 2.0, 3)),
    ],
)
def test_burst(burst: dict[str, Any], name: str, value: Any) -> None:
    assert burst["metrics"][name] == value


def test_every_name_of_the_contract_is_there(burst: dict[str, Any]) -> None:
    contract = """output_tokens_per_s requests_per_s goodput_per_s slo_attainment slot_utilization kv_utilization
        kv_waste acceptance_rate tokens_per_step prefix_hit_rate_planned prefix_hit_rate_observed mfu mbu
        peak_memory_bytes
        weights_bytes startup_s energy_j_per_output_token cost_per_million_output_tokens perplexity kl_vs_bf16
        top1_agreement kv_transfer_bytes kv_transfer_s equivalence ttft_s itl_s inter_emission_s tpot_s e2e_s
        normalized_latency_s queueing_s"""
    assert set(contract.split()) <= set(burst["metrics"])
    assert set(GIVEN_METRICS) <= set(burst["metrics"])


def test_kv_parts_of_each_step(burst: dict[str, Any]) -> None:
    steps = burst["steps"]
    assert steps["kv_used_tokens"].tolist() == [6, 8, 6, 3]
    assert steps["kv_reserved_ahead_tokens"].tolist() == [3, 1, 0, 0]  # a writes 4 + 3 - 1 positions, b 2 + 2 - 1
    assert steps["kv_internal_tokens"].tolist() == [23, 23, 26, 13]  # the dead row's 16 are all internal
    assert steps["kv_unusable_tokens"].tolist() == [8, 8, 8, 0]  # 8 free positions are no slot; nobody waits at the end
    assert steps["kept_rows"].tolist() == steps["emitted_tokens"].tolist() == [2, 2, 1, 1]
    assert steps["query_rows"].tolist() == [6, 2, 2, 3]


def test_tokens_per_step_is_null_where_a_record_does_not_say_what_its_steps_emitted() -> None:
    recorder = play(*contiguous_burst())
    older = recorder.steps().assign(emitted_tokens=pd.array([None] * 4, dtype="Int64"))
    _, metrics, _ = compute_metrics(recorder.requests(), older, NO_TELEMETRY, window_rule="burst")
    assert metrics["tokens_per_step"] is None and metrics["output_tokens"] == 6


def test_preemptions_are_those_of_the_windows_requests() -> None:
    recorder = play(*timed_mixture())
    yielded = recorder.requests()
    counts = {"w": 5, "x": 2, "y": 1}
    yielded["preemptions"] = pd.array([counts.get(name, 0) for name in yielded["request_id"]], dtype="Int64")
    timed: dict[str, Any] = {"window_rule": "timed", "warmup_s": 1.0, "last_arrival_s": 5.0}
    _, metrics, _ = compute_metrics(yielded, recorder.steps(), NO_TELEMETRY, **timed)
    assert metrics["preemptions"] == 3  # w arrives before it
    unseen = yielded.assign(preemptions=pd.array([None] * len(yielded), dtype="Int64"))
    assert compute_metrics(unseen, recorder.steps(), NO_TELEMETRY, **timed)[1]["preemptions"] is None


def test_the_most_urgent_class_has_a_ttft_of_its_own(burst: dict[str, Any]) -> None:
    rows = burst["requests"]  # TTFT 1, 1 and 3 s
    assert rows["priority"].tolist() == [0, 0, 0] and burst["metrics"]["ttft_urgent_s"]["n"] == 0

    def urgent(classes: list[int | None]) -> dict[str, Any]:
        requests = rows.assign(priority=pd.array(classes, dtype="Int64"))
        found = compute_metrics(requests, burst["steps"], NO_TELEMETRY, window_rule="burst")[1]["ttft_urgent_s"]
        assert isinstance(found, dict)
        return found

    assert urgent([3, 3, 1]) == spread(3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1)  # the smallest there is, whatever its number
    assert urgent([0, 7, 0]) == spread(2.0, 1.0, 3.0, 3.0, 3.0, 3.0, 2)
    assert urgent([2, 2, 2])["p50"] is urgent([None, None, None])["p50"] is None  # a record from before the column


def test_slot_utilization_is_null_without_slots() -> None:
    recorder = play(*contiguous_burst())
    _, metrics, _ = compute_metrics(
        recorder.requests(), recorder.steps(), NO_TELEMETRY, window_rule="burst", max_num_seqs=2, kv_layout="paged"
    )
    assert metrics["slot_utilization"] is None and metrics["slot_utilization_drain"] is None
    assert metrics["mfu"] is None and metrics["goodput_per_s"] is None and metrics["slo_attainment"] is None
    assert metrics["energy_j_per_output_token"] is None and metrics["cost_per_million_output_tokens"] is None


@pytest.fixture(scope="module")
def mixture() -> dict[str, Any]:
    recorder = play(*timed_mixture())
    window, metrics, warnings = compute_metrics(
        recorder.requests(),
        recorder.steps(),
        NO_TELEMETRY,
        window_rule="timed",
        warmup_s=1.0,
        last_arrival_s=5.0,
        max_num_seqs=2,
        kv_layout="paged",
        slo={"e2e_s": 4.5},
        price_per_hour=1.0,
        extras={"speculation": True},
    )
    return {"window": window, "metrics": metrics, "warnings": warnings, "requests": recorder.requests()}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_tokens_per_s", 3.0),  # w 5, x 6, y 1 in 4 s: tokens count by their own time, whoever they belong to
        ("requests_per_s", 0.25),  # only w ends inside
        ("goodput_per_s", 0.5),  # x and u, of the four that arrive inside
        ("slo_attainment", 0.5),  # the failed and the rejected one miss
        ("n_requests", 4),
        ("n_finished", 2),
        ("n_failed", 1),
        ("n_rejected", 1),
        ("steps", 2),
        ("tokens_per_step", 7 / 3),  # of x 4 and 2, of y 1: what came with no step counts on neither side
        ("acceptance_rate", 0.5),  # 3 + 1 of 8; the third step begins after the window
        ("prefix_hit_rate_planned", 1 / 8),  # of x, y and u
        ("kv_utilization", None),  # this target shows no cache
        ("kv_waste", {"internal": None, "reserved_ahead": None, "unusable": None}),
        ("distinct_4gram_share", 4 / 7),
        ("cost_per_million_output_tokens", 1e6 / (11 * 3600 / 4)),  # w and x are good: 5 + 6 tokens inside
        ("ttft_s", spread(1.0, 1.0, inf, inf, inf, inf, 3)),
        ("itl_s", spread(3.5 / 6, 0.625, 0.625, 0.625, 0.625, 0.625, 6)),  # 2 x 1/2, 4 x 2.5/4
        ("inter_emission_s", spread(1.75, 1.0, 2.5, 2.5, 2.5, 2.5, 2)),
        ("tpot_s", spread(3.5 / 6, 3.5 / 6, inf, inf, inf, inf, 2)),  # x (5.5 - 2)/(10 - 4); u came at once: undefined
        ("e2e_s", spread(2.75, 4.5, inf, inf, inf, inf, 3)),
        ("normalized_latency_s", spread(0.475, 0.5, inf, inf, inf, inf, 3)),
        ("queueing_s", spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2)),
    ],
)
def test_timed_mixture(mixture: dict[str, Any], name: str, value: Any) -> None:
    assert mixture["metrics"][name] == value


def test_timed_window_and_request_rows(mixture: dict[str, Any]) -> None:
    assert mixture["window"] == {"start_s": 1.0, "end_s": 5.0, "rule": "timed"}
    rows: pd.DataFrame = mixture["requests"].set_index("request_id")
    assert rows.loc["x", "emission_times_s"].tolist() == [2.0, 3.0, 5.5]
    assert rows.loc["x", "emission_tokens"].tolist() == [4, 2, 4]
    assert rows.loc["x", "output_token_ids"].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert (rows.loc["x", "draft_tokens"], rows.loc["x", "accepted_tokens"]) == (12, 7)
    assert rows.loc["z", "finish_reason"] == "rejected" and "longer than 16" in rows.loc["z", "error"]
    assert rows.loc["z", ["scheduled_s", "first_token_s"]].isna().all()
    assert rows.loc["y", "finish_reason"] == "error" and rows.loc["y", "finished_s"] == 4.0
    assert rows["submitted_s"].tolist() == [0.5, 1.0, 2.0, 3.0, 5.0]
