"""The chart of prefix reuse: bars that add up, from the metrics of arms that share and of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from simulated_run import ArmPlan, taken, write_run

from harness.console import summary_table
from harness.prefix_ceiling import prefix_context
from harness.records import read_json, read_trial, write_json, write_trial
from harness.report import build
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
    assert row[:3] == ["chain", "hash_chain", "3,072"] and (row[3], row[5]) == ("60.0 %", "55.0 %")
    summary = report.summary["arms"]
    for cell in (cell for row in chart.table.rows for cell in row if cell.source):
        assert summary[cell.source[0]]["metrics"][cell.source[2]] == cell.value


def test_it_is_in_the_page_where_an_arm_shares(tmp_path: Path) -> None:
    shares = report_of(tmp_path / "a", plain=("off", 0.6, 0.0), chain=("hash_chain", 0.6, 0.5))
    assert "Prefix reuse" in [title for title, _ in sections(shares)] and "Prefix reuse" in render(shares)
    plain = report_of(tmp_path / "b", plain=("off", 0.6, 0.0))
    assert "Prefix reuse" not in [title for title, _ in sections(plain)]


def test_a_hit_rate_comes_with_its_cache_and_its_ceiling(tmp_path: Path) -> None:
    """In whole blocks of 16, and never all of a prompt; what was rejected never began."""
    report_of(tmp_path, off=("off", 0.5, 0.0), chain=("hash_chain", 0.5, 0.4))
    for arm in ("off", "chain"):
        run, requests, steps, telemetry = taken(tmp_path / arm / "0")
        requests = requests.assign(prompt_tokens=[32, 40, 48, 100], planned_cached_tokens=[0, 31, 48, 100])
        requests["finish_reason"] = ["length", "stop", "length", "rejected"]
        run["config"]["kv_cache"] = {"name": "paged", "block_size": 16}
        write_trial(tmp_path / arm / "0", run, requests, steps, telemetry)
    ceiling = (0 + 16 + 32) / (32 + 40 + 48)
    assert prefix_context(read_trial(tmp_path / "chain" / "0")) == {
        "prefix_hit_rate_ceiling": ceiling,
        "kv_capacity_tokens": 3072.0,
    }
    report = load(tmp_path)
    row = [cell.text for cell in prefix_reuse.chart(report).table.rows[1]]
    assert row[2:6] == ["3,072", "50.0 %", "40.0 %", "40.0 %"]
    console = Console(width=250, record=True, file=(tmp_path / "out").open("w"))
    console.print(summary_table(report.summary))
    printed = console.export_text()
    assert "prefix hits / ceiling / planned" in printed
    assert "40.0 % / 40.0 % / 50.0 %" in printed and printed.count("3,072 tokens") == 2
    page = build(tmp_path).read_text("utf-8")
    for name, value in (("prefix_hit_rate_ceiling", ceiling), ("kv_capacity_tokens", 3072.0)):
        assert f'data-value="{value}" data-source="[&#34;chain&#34;, &#34;metrics&#34;, &#34;{name}&#34;]"' in page


def test_further_samples_of_a_prompt_copy_its_last_block(tmp_path: Path) -> None:
    report_of(tmp_path, paged=("off", 0.5, 0.5))
    run, requests, steps, telemetry = taken(tmp_path / "paged" / "0")
    requests = requests.assign(prompt_tokens=[40] * 4, planned_cached_tokens=[20, 39, 39, 20])
    requests["request_id"] = ["a#0", "a#1", "a#12", "b"]
    run["config"]["kv_cache"] = {"name": "paged", "block_size": 16}
    write_trial(tmp_path / "paged" / "0", run, requests, steps, telemetry)
    ceiling = prefix_context(read_trial(tmp_path / "paged" / "0"))["prefix_hit_rate_ceiling"]
    assert ceiling == (16 + 39 + 39 + 16) / 160


def test_traffic_that_repeats_nothing_has_no_ceiling(tmp_path: Path) -> None:
    report = report_of(tmp_path, off=("off", 0.0, 0.0))
    assert "prefix_hit_rate_ceiling" not in report.summary["arms"]["off"]["metrics"]
    assert "KV cache" not in [column.header for column in summary_table(report.summary).columns]
