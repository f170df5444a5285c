"""Faults that other benchmark tools had, by their numbers in the reference list, and properties of the definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.distribution import distribution, nearest_rank
from harness.latencies import emission_gaps
from harness.limits import Peaks
from harness.metrics import compute_metrics, energy_joules
from harness.records import REQUEST_SCHEMA, STEP_SCHEMA, TELEMETRY_SCHEMA, empty_frame, frame
from harness.validity import client_lag
from harness.window import Window

inf = math.inf
NO_STEPS, NO_TELEMETRY = empty_frame(STEP_SCHEMA), empty_frame(TELEMETRY_SCHEMA)


def row(intended: float, times: list[float], counts: list[int], reason: str = "length", **more: Any) -> dict[str, Any]:
    return {
        "request_id": f"{intended}-{times}",
        "prompt_tokens": 8,
        "planned_cached_tokens": 0,
        "max_tokens": 64,
        "output_tokens": sum(counts),
        "intended_s": intended,
        "submitted_s": intended,
        "scheduled_s": times[0] if times else None,
        "first_token_s": times[0] if times else None,
        "finished_s": times[-1] if times else intended,
        "finish_reason": reason,
        "preemptions": 0,
        "draft_tokens": 0,
        "accepted_tokens": 0,
        "output_token_ids": list(range(sum(counts))),
        "emission_times_s": times,
        "emission_tokens": counts,
        **more,
    }


def requests_of(*rows: dict[str, Any]) -> pd.DataFrame:
    return frame({name: [r.get(name) for r in rows] for name in REQUEST_SCHEMA.names}, REQUEST_SCHEMA)


def steps_of(*rows: dict[str, Any]) -> pd.DataFrame:
    return frame({name: [r.get(name) for r in rows] for name in STEP_SCHEMA.names}, STEP_SCHEMA)


def measured(
    requests: pd.DataFrame, rule: str = "replay", **more: Any
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    return compute_metrics(requests, NO_STEPS, NO_TELEMETRY, window_rule=rule, **more)


def test_f4_and_23_a_chunk_is_not_a_token() -> None:
    # 4 tokens every 40 ms, 40 tokens: ITL 10 ms, TPOT 10 ms, and the raw gap is kept apart
    requests = requests_of(row(0.0, [0.5 + 0.04 * i for i in range(10)], [4] * 10))
    _, metrics, _ = measured(requests)
    assert metrics["itl_s"]["p50"] == pytest.approx(0.010) and metrics["itl_s"]["n"] == 36
    assert metrics["inter_emission_s"]["p50"] == pytest.approx(0.040)
    assert metrics["tpot_s"]["p50"] == pytest.approx(0.010)
    assert metrics["output_tokens"] == 40


def test_f5_all_failed_is_null_or_inf_never_zero() -> None:
    requests = requests_of(*(row(i, [], [], "error") for i in range(3)))
    window, metrics, warnings = measured(requests)
    assert window == {"start_s": None, "end_s": None, "rule": "replay"}
    assert metrics["ttft_s"] == {"mean": None, **dict.fromkeys(("p50", "p90", "p95", "p99", "max"), inf), "n": 3}
    assert metrics["itl_s"] == {**dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max")), "n": 0}
    assert metrics["output_tokens_per_s"] is None and metrics["n_failed"] == 3
    assert any(w.startswith("failed requests: 3 of 3") for w in warnings)


def test_f6_numerator_and_denominator_share_one_window() -> None:
    # a token every 1/8 s for 10 s; the first and last fifth trimmed must not change the rate
    requests = requests_of(*(row(i / 8, [i / 8], [1]) for i in range(80)))
    whole = Window("timed", 0.0, 9.875)
    _, metrics, _ = measured(requests, "timed", warmup_s=2.0, last_arrival_s=7.9375)
    assert metrics["output_tokens_per_s"] == 48 / 5.9375
    assert whole.holds(np.array([0.0, 9.875, 9.876])).tolist() == [True, True, False]
    failing = requests_of(*(row(i / 8, [i / 8], [1], "error" if i % 5 < 3 else "stop") for i in range(80)))
    _, metrics, _ = measured(failing, "timed", warmup_s=2.0, last_arrival_s=7.9375)
    assert metrics["n_failed"] / metrics["n_requests"] == 29 / 48  # i = 16..63 with i % 5 in 0, 1, 2


def test_f6_the_work_of_a_step_that_reaches_beyond_the_window_counts_by_its_part_inside() -> None:
    """Steps of 4 s at full speed, and a window of 5 s: from 3 to 8, the first for a quarter, the last not at all."""
    steps = steps_of(
        *(
            {
                "step": i,
                "start_s": 4.0 * i,
                "end_s": 4.0 * i + 4,
                "flops": 400.0,
                "bytes": 40.0,
                "prefill_tokens": 1,
                "decode_tokens": 0,
            }
            for i in range(3)
        )
    )
    requests = requests_of(row(3.0, [4.0], [1]), row(8.0, [12.0], [1]))
    timed: dict[str, Any] = {
        "window_rule": "timed",
        "warmup_s": 3.0,
        "extras": {"peaks": Peaks(100.0, 20.0, "datasheet")},
    }
    for end_s, beyond in ((8.0, 0), (3.5, 0), (30.0, 18)):
        _, metrics, warnings = compute_metrics(requests, steps, NO_TELEMETRY, **timed, last_arrival_s=end_s)
        share = 1 - beyond / (end_s - 3)
        assert metrics["mfu"] == pytest.approx(share) and metrics["mbu"] == pytest.approx(share / 2)
        assert not [warning for warning in warnings if "above 1" in warning]
    unknown = steps.assign(flops=[400.0, None, 400.0])
    _, metrics, _ = compute_metrics(requests, unknown, NO_TELEMETRY, **timed, last_arrival_s=8.0)
    assert metrics["mfu"] is None


def test_9_10_and_14_latency_starts_at_the_intended_arrival_and_lag_is_told() -> None:
    late = requests_of(row(0.0, [2.0], [1], submitted_s=1.5))
    _, metrics, warnings = measured(late)
    assert metrics["ttft_s"]["p50"] == 2.0 and metrics["queueing_s"]["p50"] == 2.0
    assert any(w.startswith("client lag") and "1500.0 ms" in w for w in warnings)


def test_10_and_14_waiting_for_the_running_step_is_not_client_lag() -> None:
    requests = requests_of(row(0.25, [2.0], [1], submitted_s=1.005))
    step = steps_of({"step": 0, "start_s": 0.0, "end_s": 1.0})
    assert client_lag(requests, step) == pytest.approx(0.005)
    assert client_lag(requests, NO_STEPS) == pytest.approx(0.755)
    assert client_lag(requests_of(), step) == 0.0


def test_24_and_42_the_first_emission_gives_no_gap() -> None:
    itl, raw = emission_gaps(requests_of(row(0.0, [5.0, 5.25, 5.5], [1, 1, 1])))
    assert itl.tolist() == raw.tolist() == [0.25, 0.25]


def test_25_single_chunk_is_undefined_and_an_empty_reply_is_a_failure() -> None:
    _, metrics, _ = measured(requests_of(row(0.0, [1.0], [5]), row(0.0, [], [], "stop")))
    assert metrics["itl_s"]["n"] == 0 and metrics["itl_s"]["p50"] is None
    assert metrics["tpot_s"]["n"] == 1 and metrics["tpot_s"]["p50"] == inf  # the failure; the single chunk has none
    assert metrics["n_failed"] == 1 and metrics["n_finished"] == 1
    assert metrics["ttft_s"]["mean"] == 1.0 and metrics["ttft_s"]["max"] == inf


def test_26_an_undefined_latency_meets_no_slo_by_being_zero() -> None:
    requests = requests_of(row(0.0, [], [], "stop"), row(0.0, [1.0, 2.0], [1, 1]), row(0.0, [], [], "rejected"))
    _, metrics, _ = measured(requests, slo={"tpot_s": 1.0})
    assert metrics["slo_attainment"] == 1 / 3 and metrics["tpot_s"]["n"] == 2
    with pytest.raises(ValueError, match=r"slo\.itl: not a latency of a request, allowed: ttft_s"):
        measured(requests, slo={"itl": 1.0})


def test_26_a_limit_on_what_a_target_does_not_show_is_not_met() -> None:
    """When a request was scheduled, a target that shows no steps does not say."""
    hidden = requests_of(row(0.0, [1.0, 2.0], [1, 1], scheduled_s=None), row(0.0, [], [], "error", scheduled_s=None))
    shown = requests_of(row(0.0, [1.0, 2.0], [1, 1]), row(0.0, [], [], "error", scheduled_s=None))
    names = ("goodput_per_s", "slo_attainment", "cost_per_million_output_tokens")
    for requests, slo, known in (
        (hidden, {"queueing_s": 5.0}, False),
        (hidden, {"ttft_s": 5.0}, True),
        (shown, {"queueing_s": 5.0}, True),
    ):
        _, metrics, _ = measured(requests, slo=slo, price_per_hour=1.0)
        assert [metrics[name] is not None for name in names] == [known] * 3


@pytest.mark.parametrize("reason", ["error", "truncated", "aborted"])
def test_f2_f3_29_and_36_failures_are_inf_so_losing_slow_requests_helps_nobody(reason: str) -> None:
    healthy = [row(0.0, [0.1 * (i + 1)], [1]) for i in range(100)]
    _, before, _ = measured(requests_of(*healthy))
    slowest_lost = [*healthy[:90], *(row(0.0, [0.01], [1], reason) for _ in range(10))]
    _, after, _ = measured(requests_of(*slowest_lost))
    for name in ("ttft_s", "e2e_s", "normalized_latency_s"):
        assert before[name]["p99"] == pytest.approx(9.9) and after[name]["p99"] == inf
        assert after[name]["p90"] == pytest.approx(9.0) and after[name]["n"] == 100
        assert math.isfinite(after[name]["mean"])


def test_means_of_waits_and_gaps_too_are_of_finished_requests() -> None:
    """A request that failed after a long wait and between long gaps is in their percentiles, not in their means."""
    done, lost = row(0.0, [1.0, 2.0, 3.0], [1, 1, 1]), row(0.0, [9.0, 19.0], [1, 1], "error")
    _, metrics, _ = measured(requests_of(done, lost))
    expected = {"queueing_s": (1.0, 9.0, 2), "itl_s": (1.0, 10.0, 3), "inter_emission_s": (1.0, 10.0, 3)}
    assert {name: tuple(metrics[name][part] for part in ("mean", "max", "n")) for name in expected} == expected
    _, metrics, _ = measured(requests_of(lost))
    assert [metrics[name]["mean"] for name in expected] == [None] * 3 and metrics["itl_s"]["p50"] == 10.0


def test_30_tokens_of_unfinished_requests_count_by_their_time() -> None:
    cut = requests_of(row(0.0, [float(t) for t in range(1, 9)], [1] * 8, "aborted", finished_s=None))
    _, metrics, _ = measured(cut, "timed", warmup_s=2.5, last_arrival_s=6.5)
    assert metrics["output_tokens_per_s"] == 1.0 and metrics["requests_per_s"] == 0.0


def test_31_a_missing_time_is_no_time_at_all() -> None:
    requests = requests_of(row(1000.0, [], [], "error", scheduled_s=None, finished_s=None))
    _, metrics, _ = measured(requests, "timed", warmup_s=999.0, last_arrival_s=1001.0)
    assert metrics["ttft_s"]["p50"] == inf and metrics["queueing_s"]["n"] == 0
    assert metrics["queueing_s"]["p50"] is None and metrics["queueing_s"]["mean"] is None


def test_37_tokens_of_the_first_chunk_are_not_decoded_tokens() -> None:
    _, metrics, _ = measured(requests_of(row(0.0, [1.0, 2.0, 3.0], [8, 1, 1])))
    assert metrics["tpot_s"]["p50"] == 1.0  # not 2/9


def test_38_energy_is_the_counter_at_the_windows_edges() -> None:
    counter = {
        "t_s": [0.0, 10.0, 20.0],
        "source": ["gpu0"] * 3,
        "name": ["energy_j"] * 3,
        "value": [0.0, 1000.0, 1100.0],
    }
    telemetry = frame({**counter, "unit": ["J"] * 3}, TELEMETRY_SCHEMA)
    assert energy_joules(telemetry, Window("timed", 5.0, 15.0)) == 550.0
    assert energy_joules(telemetry, Window("timed", 5.0, 20.5)) is None  # no sample after the end
    assert energy_joules(telemetry, Window("timed", -0.5, 15.0)) is None
    assert energy_joules(telemetry, Window("timed", None, None)) is None
    assert energy_joules(NO_TELEMETRY, Window("timed", 5.0, 15.0)) is None


@pytest.mark.parametrize(
    ("value", "start_s", "joules"),
    [([0, 90, 20, 60], 5.0, None), ([0, 90, 20, 60], 15.0, None), ([80, 0, 20, 60], 15.0, 50.0)],
)
def test_38_a_counter_that_began_anew_in_the_window_counts_nothing(
    value: list[float], start_s: float, joules: float | None
) -> None:
    """From 90 back to 0 and on to 20: what was used meanwhile is lost, and the difference may even be below 0."""
    columns = {"t_s": [0.0, 10.0, 20.0, 30.0], "source": ["gpu0"] * 4, "name": ["energy_j"] * 4, "unit": ["J"] * 4}
    telemetry = frame({**columns, "value": value}, TELEMETRY_SCHEMA)
    assert energy_joules(telemetry, Window("timed", start_s, 30.0)) == joules


def test_38_energy_of_all_gpus_or_of_none() -> None:
    samples = [(t, "gpu0", "energy_j", 10 * t) for t in (0.0, 10.0)] + [(0.0, "gpu1", "power_w", 300.0)]
    columns = dict(zip(("t_s", "source", "name", "value"), map(list, zip(*samples, strict=True)), strict=True))
    telemetry = frame({**columns, "unit": ["J", "J", "W"]}, TELEMETRY_SCHEMA)
    assert energy_joules(telemetry, Window("timed", 0.0, 10.0)) is None  # gpu1 has no counter
    assert energy_joules(telemetry.iloc[:2], Window("timed", 0.0, 10.0)) == 100.0


def test_39_none_one_two_and_equal_values() -> None:
    assert distribution([]) == {**dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max")), "n": 0}
    assert distribution([3.0]) == {**dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), 3.0), "n": 1}
    two = distribution([2.0, 1.0])
    assert (two["p50"], two["p90"], two["max"], two["mean"]) == (1.0, 2.0, 2.0, 1.5)
    assert distribution([7.0] * 50) == {**dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), 7.0), "n": 50}
    assert distribution([1.0, 2.0, inf, inf])["p50"] == 2.0 and distribution([1.0, 2.0, inf, inf])["p99"] == inf
    for count in range(3):
        _, metrics, _ = measured(requests_of(*(row(0.0, [1.0], [1]) for _ in range(count))))
        assert metrics["n_requests"] == count and metrics["output_tokens_per_s"] is None  # a window without length


def test_43_an_slo_bounds_the_metric_that_it_names() -> None:
    """Prompt at once, steady, and long: good by TTFT and TPOT, however long the whole reply took; and the reverse."""
    long = row(0.0, [1.0 + 0.5 * i for i in range(101)], [1] * 101)
    late = row(0.0, [9.0, 9.25], [1, 1])
    by_token = measured(requests_of(long, late), slo={"ttft_s": 1.0, "tpot_s": 0.5})[1]
    by_sample = measured(requests_of(long, late), slo={"e2e_s": 10.0})[1]
    assert by_token["slo_attainment"] == by_sample["slo_attainment"] == 0.5
    assert by_token["goodput_per_s"] == 1 / 50 and by_token["cost_per_million_output_tokens"] is None
    cost = [
        measured(requests_of(long, late), slo=slo, price_per_hour=1.0)[1]["cost_per_million_output_tokens"]
        for slo in ({"ttft_s": 1.0}, {"e2e_s": 10.0})
    ]
    assert cost == pytest.approx([1e6 / (101 * 3600 / 50), 1e6 / (2 * 3600 / 50)])  # of 101 good tokens, and of 2


@given(st.lists(st.floats(0, 1e6) | st.just(inf), min_size=1, max_size=300), st.sampled_from([50, 90, 95, 99]))
def test_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], percent: int) -> None:
    found = nearest_rank(np.sort(np.array(values)), percent)
    assert found in values
    assert 100 * sum(v <= found for v in values) >= percent * len(values)
    assert 100 * sum(v < found for v in values) < percent * len(values)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0.001, 10), st.integers(1, 8)), min_size=2, max_size=40))
def test_gaps_add_up_to_the_time_between_first_and_last(emissions: list[tuple[float, int]]) -> None:
    times = np.cumsum([gap for gap, _ in emissions]).tolist()
    counts = [count for _, count in emissions]
    itl, raw = emission_gaps(requests_of(row(0.0, times, counts)))
    assert len(itl) == sum(counts) - counts[0] and len(raw) == len(times) - 1
    assert itl.sum() == pytest.approx(times[-1] - times[0]) and (itl > 0).all()


def test_unknown_window_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="window rule 'steady', allowed: burst, replay, timed"):
        measured(requests_of(), "steady")


def test_what_nobody_could_measure_is_null() -> None:
    """An inline trial gives its start-up and peak memory as null; what a caller leaves out is null too."""
    one = requests_of(row(0.0, [1.0, 2.0], [1, 1]))
    extras = {"startup_s": None, "peak_memory_bytes": None, "weights_bytes": 7}
    _, metrics, _ = measured(one, extras=extras)
    assert {name: metrics[name] for name in extras} == extras
    _, metrics, _ = measured(one)
    assert [metrics[name] for name in extras] == [None, None, None]


# --- validity ---------------------------------------------------------------------------------------------------------


def starts(warnings: list[str], what: str) -> list[str]:
    return [w for w in warnings if w.startswith(what)]


def test_few_requests_and_thin_percentiles_are_flagged() -> None:
    few = requests_of(*(row(i, [i + 1.0, i + 2.0], [1, 1]) for i in range(29)))
    many = requests_of(*(row(i, [i + 1.0, i + 2.0], [1, 1]) for i in range(100)))
    _, _, warnings = measured(few)
    assert starts(warnings, "too few requests: 29")
    assert "ttft_s (29)" in starts(warnings, "p99 of fewer than 100")[0]
    assert measured(many)[2] == []


@pytest.mark.parametrize(("service", "steady"), [(0.5, True), (3.0, True), (None, False)])
def test_a_growing_queue_is_no_steady_state(service: float | None, steady: bool) -> None:
    rows = []
    for i in range(100):
        end = i + service if service is not None else 2.0 * i + 1  # one a second arrives; None: half of them leave
        rows.append(row(float(i), [end], [1]))
    _, _, warnings = measured(requests_of(*rows), "timed", warmup_s=10.0, last_arrival_s=99.0)
    assert bool(starts(warnings, "no steady state")) is not steady


def test_no_window_is_left_by_the_warm_up() -> None:
    _, metrics, warnings = measured(requests_of(row(0.0, [1.0], [1])), "timed", warmup_s=10.0, last_arrival_s=5.0)
    assert metrics["output_tokens_per_s"] is None and starts(warnings, "no steady state: the warm-up leaves no window")


def test_44_repetitive_output_is_flagged_in_a_speculation_arm_only() -> None:
    loop = requests_of(row(0.0, [1.0, 2.0], [20, 20], output_token_ids=[1, 2] * 20))
    _, metrics, plain = measured(loop)
    assert metrics["distinct_4gram_share"] == 2 / 37 and not starts(plain, "repetitive")
    assert "0.05, below 0.5" in starts(measured(loop, extras={"speculation": True})[2], "repetitive output")[0]
    varied = requests_of(row(0.0, [1.0, 2.0], [20, 20]))
    assert not starts(measured(varied, extras={"speculation": True})[2], "repetitive")
    both = {"speculation": True, "ignore_eos": True}
    assert "end of sequence is ignored" in starts(measured(varied, extras=both)[2], "repetitive")[0]
