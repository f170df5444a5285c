"""Steps that overlap: their phases add up to more than they last."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_run import ArmPlan, run_record, write_plan

from harness.records import REQUEST_SCHEMA, STEP_SCHEMA, empty_frame, frame, write_trial
from harness.report.charts import step_time
from harness.report.data import load


def test_the_mean_step_is_as_long_as_it_lasted_however_much_ran_at_once(tmp_path: Path) -> None:
    arm, count = ArmPlan("overlap"), 4
    write_plan(tmp_path, (arm,), 1, 1, study="hand")
    columns = {name: [None] * count for name in STEP_SCHEMA.names} | {
        **{"start_s": [0.02 * i for i in range(count)], "end_s": [0.02 * (i + 1) for i in range(count)]},
        **{"schedule_s": [0.004] * count, "prepare_s": [0.002] * count, "forward_s": [0.018] * count},
        **{"sample_s": [0.002] * count, "commit_s": [0.004] * count, "attention_s": [0.006] * count},
        **{"decode_tokens": [4] * count, "prefill_tokens": [0] * count, "slot_request_ids": [[]] * count},
    }
    frames = empty_frame(REQUEST_SCHEMA), frame(columns, STEP_SCHEMA)
    write_trial(tmp_path / "overlap" / "0", run_record("hand", arm, 0, 1), *frames)
    chart = step_time.chart(load(tmp_path))
    cells = dict(zip(chart.table.columns, [cell.text for cell in chart.table.rows[0]], strict=True))
    assert (cells["steps (n)"], cells["mean step (ms)"]) == ("4", "20.00")
    assert (cells["forward"], cells["attention"], cells["other"]) == ("40.0 %", "20.0 %", "0.0 %")
    shares = {trace["name"]: trace["x"][0] for trace in chart.traces}
    assert sum(shares.values()) == pytest.approx(100)
