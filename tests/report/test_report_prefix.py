"""The chart of prefix reuse: bars that add up, from the metrics of arms that share and of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_run import ArmPlan, write_run

from harness.records import read_json, write_json
from harness.report.charts import prefix_reuse
from harness.report.data import Report, load
from harness.report.page import render, sections


def report_of(run_dir: Path, **rates: tuple[str, float, float]) -> Report:
    """Arms with (option of `prefix`, planned, observed hit rate)."""
    write_run(run_dir, [ArmPlan(name) for name in rates], trials=1, num_requests=4)
    for name, (option, planned, observed) in rates.items():
        path = run_dir / name / "0" / "run.json"
        run = read_json(path)
        run["axes"]["prefix"] = option
        run["metrics"] |= {"prefix_hit_rate_planned": planned, "prefix_hit_rate_observed": observed}
        write_json(path, run)
    return load(run_dir)


def test_the_parts_of_all_prompt_tokens(tmp_path: Path) -> None:
    report = report_of(tmp_path, plain=("off", 0.6, 0.0), chain=("hash_chain", 0.6, 0.55), lucky=("radix", 0.1, 0.2))
    chart = prefix_reuse.chart(report)
    bars = {trace["name"]: trace["x"] for trace in chart.traces}
    assert bars == {
        "found": [0, pytest.approx(55), pytest.approx(20)],
        "shared, but computed": [pytest.approx(60), pytest.approx(5), 0],
        "own": [pytest.approx(40), pytest.approx(40), pytest.approx(80)],
    }
    assert chart.layout["yaxis"]["ticktext"] == ["plain", "chain", "lucky"]
    row = [cell.text for cell in chart.table.rows[1]]
    assert row[:5] == ["chain", "hash_chain", "3,072", "60.0 %", "55.0 %"]
    summary = report.summary["arms"]
    for cell in (cell for row in chart.table.rows for cell in row if cell.source):
        assert summary[cell.source[0]]["metrics"][cell.source[2]] == cell.value


def test_it_is_in_the_page_where_an_arm_shares(tmp_path: Path) -> None:
    shares = report_of(tmp_path / "a", plain=("off", 0.6, 0.0), chain=("hash_chain", 0.6, 0.5))
    assert "Prefix reuse" in [title for title, _ in sections(shares)] and "Prefix reuse" in render(shares)
    plain = report_of(tmp_path / "b", plain=("off", 0.6, 0.0))
    assert "Prefix reuse" not in [title for title, _ in sections(plain)]
