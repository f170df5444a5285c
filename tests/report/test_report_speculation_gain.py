"""Speculation by batch: lines of arms that differ in the batch alone, and the batch where each falls to 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated_run import ArmPlan, run_record, write_plan

from harness.records import REQUEST_SCHEMA, STEP_SCHEMA, empty_frame, frame, write_trial
from harness.report.charts import speculation_gain
from harness.report.data import Report, load
from harness.report.page import sections

BATCHES = (1, 4, 16)
STEP = ("start_s", "end_s", "forward_s", "prefill_tokens", "decode_tokens", "draft_tokens", "accepted_tokens")


def write_arm(run_dir: Path, plan: ArmPlan, trial: int, step_s: float, accepted: int, predicted: float | None) -> None:
    """One step in which every sequence decodes; with ``accepted`` tokens more each."""
    n = plan.max_num_seqs
    values = (0.0, step_s, step_s, 0, n, n * plan.drafts, n * accepted)
    columns: dict[str, list[Any]] = {name: [None] for name in STEP_SCHEMA.names}
    columns |= {name: [value] for name, value in zip(STEP, values, strict=True)}
    columns |= {"step": [0], "slot_request_ids": [[]], "drafting_sequences": [n if plan.drafts else 0]}
    columns |= {name: [0.0] for name in ("schedule_s", "prepare_s", "sample_s", "propose_s", "commit_s")}
    figures = {"conditional_acceptance": 0.75, "verify_cost": 1.5, "predicted_speedup": predicted}
    metrics: dict[str, Any] = {"output_tokens_per_s": n * (1 + accepted) / step_s, "speculation": figures}
    record = run_record("hand", plan, trial, 4, metrics=metrics)
    write_trial(run_dir / plan.name / str(trial), record, empty_frame(REQUEST_SCHEMA), frame(columns, STEP_SCHEMA))


def report_of(run_dir: Path, batches: tuple[int, ...] = BATCHES) -> Report:
    """A step without drafts takes 1 s; with two, of which one stands, 1 + batch / 8 s: 1.78x, 1.33x, 0.67x."""
    plans = []
    for batch in batches:
        plain = ArmPlan(f"plain_b{batch}", max_num_seqs=batch)
        plans += [plain, ArmPlan(f"drafts_b{batch}", max_num_seqs=batch, drafts=2, versus=plain.name)]
    write_plan(run_dir, plans, 3, 4, study="hand")
    for plan in plans:
        for trial in range(3):
            pace = 1 + 0.1 * trial  # of the machine, for both arms: the ratio does not see it
            step_s = pace * (1 + plan.max_num_seqs / 8 if plan.drafts else 1)
            write_arm(run_dir, plan, trial, step_s, plan.drafts // 2, 2.0 / plan.max_num_seqs if plan.drafts else None)
    return load(run_dir)


def test_measured_and_predicted_by_batch(tmp_path: Path) -> None:
    chart = speculation_gain.chart(report_of(tmp_path))
    measured, predicted = chart.traces
    assert measured["x"] == predicted["x"] == [1, 4, 16]
    assert measured["y"] == pytest.approx([2 / 1.125, 2 / 1.5, 2 / 3], abs=1e-4)
    assert predicted["y"] == [2.0, 0.5, 0.125]
    assert measured["error_y"]["array"] == pytest.approx([0, 0, 0], abs=1e-4)
    assert measured["meta"] == {"arms": [1, 3, 5]}
    assert (measured["line"]["dash"], predicted["line"]["dash"]) == ("solid", "dash")


def test_its_table_says_up_to_which_batch_it_pays(tmp_path: Path) -> None:
    table = speculation_gain.chart(report_of(tmp_path)).table
    rows = [dict(zip(table.columns, [cell.text for cell in row], strict=True)) for row in table.rows]
    assert [row["arm"] for row in rows] == ["drafts_b1", "drafts_b4", "drafts_b16"]
    assert [row["batch"] for row in rows] == ["1", "4", "16"]
    assert rows[1]["measured"] == "1.33x [1.33, 1.33]" and rows[1]["predicted"] == "0.50x [0.50, 0.50]"
    assert (rows[1]["a: stands"], rows[1]["v: rows / step"]) == ("75.0 %", "1.50")
    assert rows[1]["output tok/s"] == "1.33x [1.33, 1.33]"
    # 4 x 4^(ln 1.333 / ln 2) and 1 x 4^(ln 2 / ln 4)
    assert {row["measured to pay up to batch"] for row in rows} == {"7.1"}
    assert {row["predicted to pay up to batch"] for row in rows} == {"2.0"}


def test_where_it_falls_outside_of_the_batches_it_is_not_guessed(tmp_path: Path) -> None:
    (line,) = speculation_gain.lines(report_of(tmp_path / "a", (1, 2)))
    assert line.break_even("measured") == speculation_gain.ABOVE
    (line,) = speculation_gain.lines(report_of(tmp_path / "b", (16, 32)))
    assert (line.break_even("measured"), line.break_even("predicted")) == (speculation_gain.BELOW,) * 2


def test_it_is_in_the_page_where_arms_draft_at_several_batches(tmp_path: Path) -> None:
    def keys(report: Report) -> list[str]:
        return [chart.key for title, charts in sections(report) if title == "Speculation" for chart in charts]

    assert "speculationgain" in keys(report_of(tmp_path / "a"))
    one = report_of(tmp_path / "b", (4,))
    assert "speculationgain" not in keys(one)
    assert speculation_gain.chart(one).empty and not speculation_gain.chart(one).traces
