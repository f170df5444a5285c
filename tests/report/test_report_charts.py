"""What the charts compute themselves, against values worked out by hand and against the metrics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from page_reader import Page
from simulated_run import HOSTILE, LADDER, run_record, write_run

from harness.records import (
    REQUEST_SCHEMA,
    STEP_SCHEMA,
    TrialRecord,
    frame,
    read_run,
    read_trial,
    write_trial,
)
from harness.report.charts import speculation
from harness.report.charts.kv_memory import PARTS, kv_parts
from harness.report.charts.slots import DEAD, DECODE, PREFILL, Bar, chart, dead_seconds, occupancy
from harness.report.charts.verdict import forest
from harness.report.data import load
from harness.report.figures import latencies
from harness.report.parts import MISSING, Chart, Table, byte_size, floats, label, number, percent
from harness.report.sampling import TAIL, extremes, ranks


def trial_of(
    folder: Path, steps: list[tuple[float, float, list[str | None]]], requests: dict[str, tuple[float, float]]
) -> TrialRecord:
    """A record with these steps (start, end, slots) and requests (first token, end)."""
    columns: dict[str, list[object]] = {name: [None] * len(steps) for name in STEP_SCHEMA.names}
    columns |= {"start_s": [s for s, _, _ in steps], "end_s": [e for _, e, _ in steps]}
    columns["slot_request_ids"] = [slots for _, _, slots in steps]
    asked: dict[str, list[object]] = {name: [None] * len(requests) for name in REQUEST_SCHEMA.names}
    asked |= {"request_id": list(requests), "first_token_s": [f for f, _ in requests.values()]}
    asked["finished_s"] = [e for _, e in requests.values()]
    run = run_record("hand", LADDER[0], 0, len(requests))
    write_trial(folder / "0", run, frame(asked, REQUEST_SCHEMA), frame(columns, STEP_SCHEMA))
    return read_trial(folder / "0")


def test_a_finished_request_that_keeps_its_row_is_dead(tmp_path: Path) -> None:
    trial = trial_of(
        tmp_path,
        [(0, 2, ["a", "b"]), (2, 3, ["a", "b"]), (3, 4, ["a", "b"]), (5, 6, ["c", None])],
        {"a": (1.9, 1.9), "b": (1.9, 3.9), "c": (5.9, 5.9)},
    )
    found = occupancy(trial)
    assert found.bars == [
        Bar(0, "a", PREFILL, 0, 2),
        Bar(1, "b", PREFILL, 0, 2),
        Bar(0, "a", DEAD, 2, 4),
        Bar(1, "b", DECODE, 2, 4),
        Bar(0, "c", PREFILL, 5, 6),
    ]
    assert found.seconds == {PREFILL: 5, DECODE: 2, DEAD: 2} and found.capacity_s == 10
    assert found.empty_share == pytest.approx(0.1) and (found.num_slots, found.used_slots) == (2, 2)


def test_a_request_that_returns_to_a_slot_has_two_bars(tmp_path: Path) -> None:
    slots: list[list[str | None]] = [["a"], [None], ["a"], ["b"]]
    steps = [(float(i), i + 1.0, held) for i, held in enumerate(slots)]
    trial = trial_of(tmp_path, steps, {"a": (0.5, 2.5), "b": (9, np.inf)})
    spans = [(b.request_id, b.state, b.start_s, b.end_s) for b in occupancy(trial).bars]
    assert spans == [("a", PREFILL, 0, 1), ("a", DECODE, 2, 3), ("b", PREFILL, 3, 4)]


def test_dead_rows_are_static_batchings_alone_and_agree_with_its_steps(ladder: Path) -> None:
    record = read_run(ladder)
    for trial in record.trials:
        dead_s = dead_seconds(trial)
        assert occupancy(trial).seconds[DEAD] == pytest.approx(dead_s)
        assert (dead_s > 0) == (trial.run["arm"] == "static")


def test_dead_rows_that_cannot_be_seen_are_told(tmp_path: Path) -> None:
    """`emit=batch_end`: every request ends when its batch does, as the client sees it."""
    write_run(tmp_path, LADDER[:1], trials=1, num_requests=8)
    assert "look like decoding" not in chart(load(tmp_path)).note
    path = tmp_path / "static" / "0" / "requests.parquet"
    requests = pd.read_parquet(path)
    requests["finished_s"] = 1e9
    pq.write_table(pa.Table.from_pandas(requests, REQUEST_SCHEMA, preserve_index=False), path)
    note = chart(load(tmp_path)).note
    assert "static: tokens were held until their batch ended" in note


def test_kv_parts_fill_the_budget_in_every_step(ladder: Path) -> None:
    for trial in read_run(ladder).trials:
        parts = kv_parts(trial.steps)
        assert list(parts) == list(PARTS)
        assert (np.sum(list(parts.values()), axis=0) == trial.steps["kv_capacity_tokens"].to_numpy(float)).all()


def test_what_no_draft_gave_is_drawn_beside_what_was_drafted_and_accepted(ladder: Path) -> None:
    report = load(ladder)
    drawn = speculation.chart(report)
    (arm,) = (arm for arm in report.arms if arm.name == "speculative")
    assert arm.shown is not None
    steps = arm.shown.steps
    lines = {trace["name"]: trace for trace in drawn.traces}
    assert list(lines) == ["drafted", "accepted", "the target's own"]
    own = (steps["emitted_tokens"] - steps["accepted_tokens"]).set_axis(steps["start_s"].round(4))
    line = lines["the target's own"]
    assert len(set(line["y"])) > 2 and line["y"] == own[line["x"]].tolist()
    assert "dashed: the target's own" in drawn.note
    assert len(drawn.table.rows) == 1 and drawn.table.columns[3] == "the target's own"
    assert drawn.table.rows[0][3].value == sum(t.own_tokens or 0 for t in arm.figures.trials)


def test_a_record_that_does_not_tell_what_its_steps_emitted(tmp_path: Path) -> None:
    write_run(tmp_path, LADDER[3:4], trials=1, num_requests=8)
    path = tmp_path / "speculative" / "0" / "steps.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["emitted_tokens"]), path)
    drawn = speculation.chart(load(tmp_path))
    assert [trace["name"] for trace in drawn.traces] == ["drafted", "accepted"]
    assert "dashed" not in drawn.note and "not in these records" in drawn.note
    assert drawn.table.rows[0][3].text == MISSING != drawn.table.rows[0][2].text


def test_the_distributions_are_those_of_the_percentiles(ladder: Path) -> None:
    for trial in read_run(ladder).trials:
        for metric, values in latencies(trial).items():
            said = trial.run["metrics"][metric]
            assert len(values) == said["n"] and values.max() == said["max"]
            assert np.sort(values)[-(-50 * len(values) // 100) - 1] == said["p50"]


def test_a_drawn_distribution_ends_at_its_maximum(ladder: Path) -> None:
    page = Page(ladder / "report.html")
    trials = [t for t in read_run(ladder).trials if t.run["arm"] == "paged"]
    line = next(t for t in page.specs["itl"]["data"] if t["name"].startswith("paged"))
    assert line["x"][-1] == pytest.approx(1e3 * max(t.run["metrics"]["itl_s"]["max"] for t in trials), abs=1e-4)
    assert line["y"][-1] == 100 and f"n {sum(t.run['metrics']['itl_s']['n'] for t in trials):,}" in line["name"]


def test_extremes_survive_decimation() -> None:
    values = np.sin(np.arange(10_000) / 50)
    values[[1234, 8765]] = 9.0, -9.0
    other = np.zeros(10_000)
    other[4321] = 5.0
    kept = extremes([values, other], 200)
    assert len(kept) <= 202 and {0, 1234, 4321, 8765, 9999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert extremes([values[:7]], 200).tolist() == list(range(7)) and extremes([], 5).tolist() == []


def test_ranks_keep_the_whole_tail() -> None:
    kept = ranks(50_000, 400)
    assert len(kept) <= 400 and kept[0] == 0
    assert kept[-TAIL:].tolist() == list(range(50_000 - TAIL, 50_000))
    assert ranks(3, 400).tolist() == [0, 1, 2]


def test_a_charts_data_cannot_close_its_script_element() -> None:
    spec = Chart("key", "title", "note", Table((), ()), [{"name": HOSTILE}]).spec
    assert not set("<>&") & set(spec) and json.loads(spec)["data"][0]["name"] == HOSTILE


def test_texts_of_numbers() -> None:
    assert (number(None), number(float("nan")), number(float("inf")), number(1234.5, 1)) == (
        "\u2013",
        "\u2013",
        "inf",
        "1,234.5",
    )
    assert (percent(0.4567), percent(None), percent(float("inf"))) == ("45.7 %", "\u2013", "inf")
    assert (byte_size(7.1e7), byte_size(9e8), byte_size(2.5e9), byte_size(None)) == (
        "71.0 MB",
        "900 MB",
        "2.5 GB",
        "\u2013",
    )
    assert floats([1.23456789, float("nan"), float("inf"), None], 3) == [1.235, None, None, None]
    assert label("<a href='x'>b & c</a>") == "&lt;a href='x'&gt;b &amp; c&lt;/a&gt;"
    assert len(label("x" * 200, 20)) == 20


def test_the_picture_of_a_ratio_is_ordered_and_has_its_line_at_one() -> None:
    picture = forest(2.0, 1.5, 2.5, (0.5, 4.0))
    at = {name: float(picture.split(f'class="{name}" x1="')[1].split('"')[0]) for name in ("one", "whisker")}
    assert at["one"] < at["whisker"] < 92
    assert "whisker" not in forest(2.0, None, None, (0.5, 4.0))


def test_missing_numbers_do_not_hide_a_step(ladder: Path) -> None:
    steps = read_run(ladder).trials[0].steps.copy()
    steps["kv_unusable_tokens"] = pd.array([None] * len(steps), dtype="Int64")
    parts = kv_parts(steps)
    assert not parts["unusable"].any() and len(parts["free"]) == len(steps)
