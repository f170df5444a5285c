"""The figures of every trial: those of the frames and of the metrics, made without keeping a table in memory."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from simulated_run import LADDER, run_record

import harness.records as records
from harness.latencies import emission_gaps, request_latencies
from harness.records import REQUEST_SCHEMA, frame, read_run, read_trial, write_trial
from harness.report.__main__ import main
from harness.report.data import load
from harness.report.figures import DISTRIBUTIONS, arm_figures, curve, latencies, step_figures
from harness.report.page import render
from harness.report.sampling import TAIL

TABLES = {"requests", "steps", "telemetry"}


def test_sums_are_those_of_the_frames(ladder: Path) -> None:
    for trial in read_run(ladder).trials:
        found, steps = step_figures(trial), trial.steps
        assert (found.trial, found.num_steps) == (trial.run["trial"], len(steps)) and trial.num_steps == len(steps)
        for name in ("draft_tokens", "accepted_tokens"):
            assert getattr(found, name) == steps[name].sum(), name
        assert found.own_tokens == trial.requests["output_tokens"].sum() - found.accepted_tokens > 0
        for phase, seconds in found.phases_s.items():
            assert seconds == pytest.approx(math.fsum(steps[f"{phase}_s"]), abs=1e-12), phase
        assert found.steps_s == pytest.approx(math.fsum(steps["end_s"] - steps["start_s"]))
        decoding = steps[(steps["prefill_tokens"] == 0) & (steps["decode_tokens"] > 0)]
        assert found.num_decode_steps == len(decoding) > 0 and found.decode is not None
        assert found.decode.forward_s == pytest.approx(decoding["forward_s"].mean())
        assert found.decode.sequences == pytest.approx(decoding["decode_tokens"].mean())


def test_what_no_step_recorded_is_not_zero(ladder: Path, tmp_path: Path) -> None:
    shutil.copytree(ladder / "speculative" / "0", tmp_path / "0")
    path = tmp_path / "0" / "steps.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["attention_s", "emitted_tokens"]), path)
    found = step_figures(read_trial(tmp_path / "0"))
    assert found.decode is None and not found.attention_known and found.own_tokens is None
    assert found.num_decode_steps > 0 and found.draft_tokens > 0 and found.decode_rate is not None


@pytest.mark.parametrize(("rule", "counted"), [("burst", [0, 1, 2, 4, 5]), ("timed", [1, 2, 5])])
def test_latencies_are_those_of_the_metrics(rule: str, counted: list[int], tmp_path: Path) -> None:
    """Finished before the window, finished, failed, rejected, without a token, of one emission."""
    columns: dict[str, list[Any]] = {name: [None] * 6 for name in REQUEST_SCHEMA.names}
    columns |= {
        "request_id": list("abcdef"),
        "finish_reason": ["length", "stop", "error", "rejected", "stop", None],
        "intended_s": [0.1, 1.0, 1.5, 1.6, 9.0, 2.0],
        "scheduled_s": [0.2, 1.1, 1.6, None, 9.1, 2.1],
        "emission_times_s": [[0.5, 0.75], [1.25, 1.5, 2.5], [1.75, 2.0], [], [], [2.5]],
        "emission_tokens": [[1, 1], [1, 3, 2], [2, 2], [], [], [4]],
    }
    requests = frame(columns, REQUEST_SCHEMA)
    window = {"rule": rule, "start_s": 1.0, "end_s": 8.0}
    write_trial(tmp_path / "0", run_record("hand", LADDER[0], 0, 6, window=window), requests)
    found = latencies(read_trial(tmp_path / "0"))
    assert tuple(found) == DISTRIBUTIONS
    for name in ("ttft_s", "e2e_s"):
        expected = request_latencies(requests)[name].to_numpy(float)[counted]
        assert found[name].tolist() == expected.tolist() and np.isinf(expected).any(), name
    assert found["e2e_s"][1 if rule == "burst" else 0] == 1.5 != found["ttft_s"][1 if rule == "burst" else 0]
    gaps, _ = emission_gaps(requests.iloc[counted])
    assert found["itl_s"].tolist() == gaps.tolist() and len(gaps) >= 7


def test_a_curve_counts_what_is_endless_and_keeps_the_tail() -> None:
    parts = [np.array([3.0, math.inf]), np.arange(10_000.0), np.array([math.inf])]
    found = curve(parts, 400)
    assert (found.n, found.n_finite) == (10_003, 10_001) and len(found.values) == len(found.ranks) <= 400
    assert found.values[-TAIL:].tolist() == list(range(10_000 - TAIL, 10_000)) and found.values[0] == 0
    assert (curve([], 400).n, len(curve([], 400).values)) == (0, 0)


def test_no_table_stays_in_memory_but_those_of_the_timelines(ladder: Path) -> None:
    report = load(ladder)
    for arm in report.arms:
        assert len(arm_figures(arm.ok, 400).trials) == len(arm.ok) == len(arm.figures.trials)
    assert not [trial.path for trial in report.record.trials if TABLES & vars(trial).keys()]
    render(report)
    kept = [trial for trial in report.record.trials if TABLES & vars(trial).keys()]
    assert kept == [arm.shown for arm in report.arms] and len(kept) < len(report.record.trials)


def test_a_run_is_read_once(ladder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ladder, tmp_path / "run")
    read: list[Path] = []

    def counting(directory: Path, tables: bool) -> records.TrialRecord:
        read.append(directory)
        return read_trial(directory, tables)

    monkeypatch.setattr(records, "read_trial", counting)
    assert main([str(tmp_path / "run")]) == 0
    assert len(read) == len(set(read)) == len(list(ladder.glob("*/*/run.json")))
    for name in ("report.html", "summary.json"):  # whether in one go, or by `summarize` and then `build`
        assert (tmp_path / "run" / name).read_bytes() == (ladder / name).read_bytes()


def test_corrupt_data_is_one_line_and_status_2(
    ladder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(ladder, run_dir)
    path = run_dir / "paged" / "1" / "requests.parquet"
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    path.write_bytes(whole[:4] + bytes(len(whole) - 4 - footer) + whole[-footer:])
    assert main([str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: not readable as parquet") and error.count("\n") == 1
