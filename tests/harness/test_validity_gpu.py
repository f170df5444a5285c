"""Warnings of GPU throttling and sharing, of garbage collection and of a busy host, from hand-made telemetry."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.metrics import compute_metrics
from harness.records import REQUEST_SCHEMA, STEP_SCHEMA, TELEMETRY_SCHEMA, empty_frame, frame
from harness.validity import busy_host, gc_warnings, gpu_warnings

WINDOW = {"start_s": 1.0, "end_s": 2.0, "rule": "timed"}
IDLE, CLOCKS_SET, POWER_CAP, SLOWDOWN, THERMAL = 0x1, 0x2, 0x4, 0x8, 0x40


def telemetry(**readings: list[float | None]) -> pd.DataFrame:
    """``gpu0_throttle_reasons=[...]``: spread evenly over the window, both ends included."""
    rows: list[dict[str, Any]] = []
    for key, values in readings.items():
        source, _, name = key.partition("_")
        for i, value in enumerate(values):
            rows.append({"t_s": 1.0 + i / max(1, len(values) - 1), "source": source, "name": name, "value": value})
    return frame({name: [row.get(name) for row in rows] for name in TELEMETRY_SCHEMA.names}, TELEMETRY_SCHEMA)


def test_throttling_names_each_reason_with_its_share() -> None:
    bits = [IDLE, POWER_CAP, POWER_CAP | THERMAL | SLOWDOWN | IDLE, CLOCKS_SET]
    assert gpu_warnings(telemetry(gpu0_throttle_reasons=bits), WINDOW) == [
        "GPU clock throttling: gpu0 in 50 % of 4 samples "
        "(software power cap 50 %, hardware slowdown 25 %, hardware thermal slowdown 25 %)"
    ]


def test_a_reason_that_nvml_may_add_is_told_by_its_bit() -> None:
    assert gpu_warnings(telemetry(gpu0_throttle_reasons=[0x1000, *[0.0] * 799]), WINDOW) == [
        "GPU clock throttling: gpu0 in 0.125 % of 800 samples (0x1000 0.125 %)"
    ]


def test_idle_and_set_clocks_are_no_throttling() -> None:
    readings = telemetry(gpu0_throttle_reasons=[0.0, IDLE, CLOCKS_SET, IDLE | CLOCKS_SET], gpu0_other_processes=[0.0])
    assert gpu_warnings(readings, WINDOW) == []


def test_other_processes_are_told_with_their_share_and_number() -> None:
    assert gpu_warnings(telemetry(gpu1_other_processes=[0, 2, 1, 0, 0]), WINDOW) == [
        "GPU sharing: other processes on gpu1 in 40 % of 5 samples, up to 2 at once"
    ]


def test_each_gpu_is_judged_by_its_own_answers() -> None:
    """A null is no sample: it neither warns nor thins out those that there are."""
    readings = telemetry(
        gpu0_throttle_reasons=[None, None],
        gpu1_throttle_reasons=[None, POWER_CAP, None, IDLE],
        gpu0_other_processes=[None, 3],
        gpu1_other_processes=[0, 0],
    )
    assert gpu_warnings(readings, WINDOW) == [
        "GPU clock throttling: gpu1 in 50 % of 2 samples (software power cap 50 %)",
        "GPU sharing: other processes on gpu0 in 100 % of 1 samples, up to 3 at once",
    ]


def test_only_the_window_counts() -> None:
    readings = telemetry(gpu0_throttle_reasons=[POWER_CAP, IDLE, IDLE], gpu0_other_processes=[0, 0, 4])
    inside = {**WINDOW, "start_s": 1.2, "end_s": 1.8}
    assert gpu_warnings(readings, inside) == []
    assert len(gpu_warnings(readings, WINDOW)) == 2
    assert gpu_warnings(readings, {"start_s": None, "end_s": None, "rule": "burst"}) == []


@pytest.mark.parametrize("readings", [{}, {"process_throttle_reasons": [4.0], "host_other_processes": [1.0]}])
def test_without_a_gpu_there_is_nothing_to_warn_of(readings: dict[str, list[float | None]]) -> None:
    assert gpu_warnings(telemetry(**readings), WINDOW) == []


def test_garbage_collection_is_told_with_its_size() -> None:
    readings = telemetry(process_gc_pause_s=[0.0, 0.012, 0.0005, 0.02, 0.0])
    assert gc_warnings(readings, WINDOW) == [
        "garbage collection: pauses of 32.5 ms in a window of 1 s, at most 20.0 ms between two samples"
    ]
    assert gc_warnings(readings, {**WINDOW, "start_s": 1.8}) == []
    assert gc_warnings(readings, {**WINDOW, "start_s": None}) == []


@pytest.mark.parametrize("readings", [{}, {"process_gc_pause_s": [0.0, 0.0005, None]}, {"host_gc_pause_s": [1.0]}])
def test_no_pause_worth_the_name_is_no_warning(readings: dict[str, list[float | None]]) -> None:
    assert gc_warnings(telemetry(**readings), WINDOW) == []


def test_a_busy_host_is_told_with_what_others_used_before_and_during_the_trial() -> None:
    """Of four CPUs: the trial keeps two busy, a neighbour one more; then the neighbour leaves."""
    readings = telemetry(host_cpu_percent=[75.0] * 11, process_cpu_percent=[200.0] * 11)
    assert busy_host(3.0, readings, WINDOW, 4) == ["busy host: of its CPUs others used 25 % during this trial"]
    assert busy_host(35.0, readings, WINDOW, 4) == [
        "busy host: of its CPUs others used 35 % before this trial, 25 % during this trial"
    ]
    alone = telemetry(host_cpu_percent=[50.0] * 11, process_cpu_percent=[200.0] * 11)
    assert busy_host(3.0, alone, WINDOW, 4) == []
    assert busy_host(35.0, alone, WINDOW, 4) == ["busy host: of its CPUs others used 35 % before this trial"]


def test_a_neighbour_counts_by_how_long_it_was_busy() -> None:
    """A reading is of the time since the one before it: the first is of a time before the window."""
    readings = telemetry(host_cpu_percent=[100.0, 100.0, 0.0], process_cpu_percent=[0.0, 0.0, 0.0])
    readings.loc[readings["t_s"] == 1.5, "t_s"] = 1.1
    assert busy_host(0.0, readings, WINDOW, 2) == []
    readings.loc[readings["t_s"] == 1.1, "t_s"] = 1.9
    assert busy_host(0.0, readings, WINDOW, 2) == ["busy host: of its CPUs others used 90 % during this trial"]


@pytest.mark.parametrize("window", [{**WINDOW, "start_s": 1.7}, {**WINDOW, "start_s": None}])
def test_a_window_too_short_for_the_clocks_ticks_says_nothing_of_its_host(window: dict[str, Any]) -> None:
    readings = telemetry(host_cpu_percent=[100.0] * 11, process_cpu_percent=[0.0] * 11)
    assert busy_host(0.0, readings, window, 2) == []
    assert busy_host(0.0, telemetry(host_cpu_percent=[100.0] * 11), WINDOW, 2) == []


def test_a_trials_warnings_hold_those_of_its_gpus_and_of_garbage_collection() -> None:
    tables = empty_frame(REQUEST_SCHEMA), empty_frame(STEP_SCHEMA)
    readings = telemetry(gpu0_throttle_reasons=[THERMAL], process_gc_pause_s=[0.004])
    _, _, warnings = compute_metrics(*tables, readings, window_rule="timed", warmup_s=1.0, last_arrival_s=2.0)
    assert "GPU clock throttling: gpu0 in 100 % of 1 samples (hardware thermal slowdown 100 %)" in warnings
    assert any(warning.startswith("garbage collection: pauses of 4.0 ms") for warning in warnings)
