"""Attention, linear layers and speculation told apart: each figure against one worked out by hand from the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from page_reader import Page
from simulated_run import ArmPlan, run_record, write_plan, write_run

from harness.records import REQUEST_SCHEMA, STEP_SCHEMA, empty_frame, frame, write_trial
from harness.report import build
from harness.report.charts import decode_step, linear_layers, speedup, step_time
from harness.report.charts.decode_step import decode_means
from harness.report.charts.step_time import phase_seconds
from harness.report.data import load
from harness.report.parts import MISSING, Chart, Table
from harness.speculation import speculation_metrics

COUNTS = ("prefill_tokens", "decode_tokens", "draft_tokens", "accepted_tokens", "drafting_sequences")
SECONDS = ("schedule_s", "prepare_s", "forward_s", "sample_s", "propose_s", "commit_s")
Step = Mapping[str, float | None]


def write_steps(run_dir: Path, plan: ArmPlan, trial: int, steps: Sequence[Step], **changes: Any) -> None:
    """A record of these steps, one after the other; ``s`` is a step's length, what is left out is 0 or null."""
    columns: dict[str, list[Any]] = {name: [None] * len(steps) for name in STEP_SCHEMA.names}
    columns |= {name: [step.get(name, 0) for step in steps] for name in (*COUNTS, *SECONDS)}
    columns["attention_s"] = [step.get("attention_s") for step in steps]
    ends = [sum(float(step["s"] or 0) for step in steps[: i + 1]) for i in range(len(steps))]
    columns |= {"end_s": ends, "start_s": [0.0, *ends[:-1]], "slot_request_ids": [[] for _ in steps]}
    record = run_record("hand", plan, trial, 1, **changes)
    frames = (empty_frame(REQUEST_SCHEMA), frame(columns, STEP_SCHEMA))
    write_trial(run_dir / plan.name / str(trial), record, *frames)


def decoding(attention_s: float | None, forward_s: float, s: float) -> dict[str, float | None]:
    return {"decode_tokens": 4, "attention_s": attention_s, "forward_s": forward_s, "s": s}


def texts(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, [cell.text for cell in row], strict=True)) for row in table.rows]


def drawn(chart: Chart) -> dict[str, list[float | None]]:
    return {trace["name"]: trace["x"] for trace in chart.traces}


ONE, TWO = ArmPlan("contiguous"), ArmPlan("paged", versus="contiguous")


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two arms, three trials; the machine is slower by 1 ms of attention in each trial than in the one before."""
    write_plan(tmp_path, (ONE, TWO), 3, 1, study="hand")
    for trial in range(3):
        drift = 0.001 * trial
        prefill = {"prefill_tokens": 90, "decode_tokens": 3, "attention_s": 0.5, "forward_s": 0.9, "s": 1.0}
        for arm, attention_s in ((ONE, 0.004), (TWO, 0.006)):
            a = attention_s + drift
            steps = [prefill, decoding(a - 0.001, 0.02, 0.022), decoding(a + 0.001, 0.024, 0.026)]
            write_steps(tmp_path, arm, trial, steps)
    return tmp_path


def test_a_decode_step_is_split_at_attention(pair: Path) -> None:
    report = load(pair)
    trial = report.arms[1].figures.trials[1]
    assert trial.num_decode_steps == 2
    assert decode_means(trial) == pytest.approx(
        {"attention": 7, "other forward": 15, "outside forward": 2, "sequences": 4}
    )


def test_what_paging_costs_is_given_in_ms_of_attention(pair: Path) -> None:
    chart = decode_step.chart(load(pair))
    one, two = texts(chart.table)
    assert list(one.values()) == ["contiguous", "6", "4.0", "5.00", "17.00", "2.00", *[MISSING] * 4]
    # attention 2 ms more and, as the forward pass is as long, all else 2 ms less
    assert list(two.values()) == ["paged", "6", "4.0", "7.00", "15.00", "2.00", "contiguous", "+2.00", "-2.00", "+0.00"]
    assert drawn(chart) == {"attention": [5, 7], "other forward": [17, 15], "outside forward": [2, 2]}


def test_differences_are_paired_by_trial(pair: Path) -> None:
    """Of trials 0 and 2 in one arm and 0, 1, 2 in the other, the unpaired medians would differ by 2 ms + the drift."""
    for path in (pair / "contiguous" / "1", pair / "contiguous" / "2"):
        (path / "run.json").unlink()
    two = texts(decode_step.chart(load(pair)).table)[1]
    assert (two["attention (ms)"], two["\u0394 attention (ms)"]) == ("7.00", "+2.00")


def test_phases_split_the_forward_pass_where_attention_is_known(pair: Path) -> None:
    report = load(pair)
    seconds = phase_seconds(report.arms[0])
    assert seconds["attention"] == pytest.approx(3 * (0.5 + 0.008) + 2 * 0.003)
    assert seconds["attention"] + seconds["forward"] == pytest.approx(3 * 0.944)
    assert sum(seconds.values()) == pytest.approx(3 * 1.048)


def test_attention_that_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    write_plan(tmp_path, (ONE, TWO), 1, 1, study="hand")
    write_steps(tmp_path, ONE, 0, [decoding(0.004, 0.02, 0.022), decoding(None, 0.02, 0.022)])
    write_steps(tmp_path, TWO, 0, [decoding(0.004, 0.02, 0.022), decoding(0.006, 0.02, 0.022)])
    report = load(tmp_path)
    assert "attention" not in phase_seconds(report.arms[0])
    assert phase_seconds(report.arms[0])["forward"] == pytest.approx(0.04)
    (unknown, known) = texts(step_time.chart(report).table)
    assert (unknown["attention"], known["attention"]) == (MISSING, "22.7 %")
    (row,) = texts(decode_step.chart(report).table)
    assert (row["arm"], row["difference to"], row["\u0394 attention (ms)"]) == ("paged", MISSING, MISSING)


def test_times_of_an_arm_whose_speed_is_emulated_are_compared_with_none(pair: Path) -> None:
    path = pair / "paged" / "2" / "run.json"
    path.write_text(path.read_text().replace('"emulated": []', '"emulated": ["by hand"]'))
    two = texts(decode_step.chart(load(pair)).table)[1]
    assert (two["attention (ms)"], two["difference to"], two["\u0394 attention (ms)"]) == ("7.00", MISSING, MISSING)


def stages(rows: int, apply_s: float, *parts: float) -> dict[str, float | None]:
    given = dict(zip(("quantize_s", "matmul_s", "rescale_s"), parts or (None,) * 3, strict=True))
    return {"rows": rows, "apply_s": apply_s, **given}


def test_linear_layers_are_split_and_compared_at_equal_rows(tmp_path: Path) -> None:
    plans = (
        *(ArmPlan("bf16"), ArmPlan("int8", precision="int8", versus="bf16")),
        ArmPlan("fp8", precision="fp8", versus="bf16", emulated=("by hand",)),
    )
    write_plan(tmp_path, plans, 3, 1, study="hand")
    step = [decoding(0.004, 0.02, 0.022)]
    for trial, slow in enumerate((1.0, 2.0, 5.0)):  # the machine, in both arms: the ratio does not change
        bf16 = [stages(1, 0.020 * slow), stages(4, 0.030 * slow)]
        write_steps(tmp_path, plans[0], trial, step, linear_stages=bf16)
        int8 = [stages(1, 0.010 * slow, 0.001, 0.008 * slow, 0.003), stages(16, 0.1, 0.01, 0.07, 0.03)]
        write_steps(tmp_path, plans[1], trial, step, linear_stages=int8)
    write_steps(tmp_path, plans[2], 0, step, linear_stages=[stages(1, 0.05, 0.02, 0.02, 0.02)])
    chart = linear_layers.chart(load(tmp_path))
    assert [[cell.text for cell in row] for row in chart.table.rows] == [
        ["bf16", "1", "40.00", *[MISSING] * 5],
        ["bf16", "4", "60.00", *[MISSING] * 5],
        ["int8", "1", "20.00", "1.00", "16.00", "3.00", "bf16", "0.50x [0.50, 0.50]"],
        ["int8", "16", "100.00", "10.00", "70.00", "30.00", "bf16", MISSING],  # nothing to compare at 16 rows
        ["fp8", "1", "50.00", "20.00", "20.00", "20.00", "bf16", MISSING],  # emulated
    ]
    assert chart.layout["yaxis"]["ticktext"] == [
        *("bf16 \u00b7 1 row", "int8 \u00b7 1 row", "fp8 \u00b7 1 row", "bf16 \u00b7 4 rows", "int8 \u00b7 16 rows")
    ]
    assert drawn(chart) == {
        "quantise": [None, 1, 20, None, 10],
        "product": [None, 16, 20, None, 70],
        "rescale": [None, 3, 20, None, 30],
        "whole layers": [40, None, None, 60, None],
    }


PLAIN, DRAFTS = ArmPlan("plain"), ArmPlan("ngram", drafts=4, versus="plain")


def write_speculation(run_dir: Path, **drafts: Any) -> None:
    """8 sequence-steps, 4 of them with drafts of which 6 tokens are accepted; every step takes 30 ms."""
    write_plan(run_dir, (PLAIN, DRAFTS), 3, 1, study="hand")
    common = {"decode_tokens": 2, "forward_s": 0.02, "s": 0.03}
    steps = [
        {**common, "propose_s": 0.001},
        {**common, "propose_s": 0.003, "draft_tokens": 8, "accepted_tokens": 4, "drafting_sequences": 2},
        {**common, "propose_s": 0.003, "draft_tokens": 4, "accepted_tokens": 0, "drafting_sequences": 1},
        {**common, "propose_s": 0.001, "draft_tokens": 2, "accepted_tokens": 2, "drafting_sequences": 1},
    ]
    table = pd.DataFrame([{**dict.fromkeys(COUNTS, 0), **step} for step in steps])
    figures = speculation_metrics(table, drafts.get("decode_costs"))
    for trial in range(3):
        plain = {"output_tokens_per_s": 30.0, "itl_s": {"mean": 0.03}}
        write_steps(run_dir, PLAIN, trial, [common], metrics=plain)
        speeds = {"output_tokens_per_s": 40.0, "itl_s": {"mean": 0.02}, "tokens_per_step": 1.75}
        write_steps(run_dir, DRAFTS, trial, steps, metrics={**speeds, "speculation": figures}, **drafts)


def test_the_predicted_speedup_is_that_of_its_formula(tmp_path: Path) -> None:
    costs = [{"sequences": 1, "rows": 1, "forward_s": 0.019}, {"sequences": 2, "rows": 2, "forward_s": 0.02}]
    write_speculation(tmp_path, decode_costs=[*costs, {"sequences": 2, "rows": 10, "forward_s": 0.036}])
    report = load(tmp_path)
    chart = speedup.chart(report)
    (row,) = texts(chart.table)
    assert row["d: drafting share"] == "50.0 %" and row["tokens a step"] == "1.75"
    # d = 4 / 8, g = 14 / 4, of which 6 / 4 stand. Rows 2, 10, 6, 4 take 20, 36, 28, 24 ms against 20 each; drafting
    # takes 8 ms in all, so a draft for each of the sequences 0.1 / (0.5 x 3.5) forward passes.
    shown = [row[name] for name in ("g: drafts", "a: stands", "c: draft / step", "v: rows / step")]
    assert shown == ["3.50", "66.3 %", "0.057", "1.35"]
    # (1 + 0.5 x 1.5) / (108 / 80 + 8 / 80)
    # 14 tokens of 8 sequence-steps against 2 of 2, all steps of 30 ms
    assert (row["predicted"], row["measured"]) == ("1.21x", "1.75x [1.75, 1.75]")
    assert (row["measured against"], row["output tok/s"]) == ("plain", "1.33x [1.33, 1.33]")
    assert drawn(chart) == {"predicted": [1.2069], "measured": [1.75]}


@pytest.mark.parametrize("costs", [None, [], [{"sequences": 1, "rows": 1, "forward_s": 0.02}]])
def test_a_record_without_what_rows_cost_predicts_nothing(costs: Any, tmp_path: Path) -> None:
    write_speculation(tmp_path, decode_costs=costs)
    (row,) = texts(speedup.chart(load(tmp_path)).table)
    assert (row["d: drafting share"], row["g: drafts"]) == ("50.0 %", "3.50")
    assert [row[name] for name in ("v: rows / step", "c: draft / step", "predicted")] == [MISSING] * 3
    assert row["measured"].startswith("1.75x")


def test_a_baseline_that_drafts_is_compared_with_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, (ArmPlan("ngram", drafts=2), ArmPlan("also", drafts=4)), trials=1, num_requests=5)
    first, second = texts(speedup.chart(load(tmp_path)).table)
    assert (first["measured"], first["measured against"], first["output tok/s"]) == (MISSING,) * 3
    assert second["measured"].endswith("x") and second["measured against"] == "ngram"  # one pair: no interval
    assert first["predicted"].endswith("x")


def test_a_run_recorded_before_all_this_still_renders(tmp_path: Path) -> None:
    write_run(tmp_path, (PLAIN, DRAFTS), trials=1, num_requests=6)
    for path in tmp_path.glob("*/*/steps.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["attention_s", "drafting_sequences"]), path)
    for path in tmp_path.glob("*/*/run.json"):
        lines = path.read_text().replace('"decode_costs"', '"x"').replace('"linear_stages"', '"y"')
        path.write_text(lines.replace('"speculation"', '"z"'))
    page = Page(build(tmp_path))
    assert {"steptime", "speedup"} <= set(page.specs) and not {"decode", "linear"} & set(page.specs)
    assert [trace["name"] for trace in page.specs["steptime"]["data"]].count("attention") == 0
    (row,) = texts(speedup.chart(load(tmp_path)).table)
    assert (row["d: drafting share"], row["predicted"]) == (MISSING, MISSING) and row["measured"].endswith("x")
