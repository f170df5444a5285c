"""Time by operator group: the chart against profiles written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from page_reader import Page
from simulated_run import ArmPlan, write_measured, write_plan

from harness.report import build
from harness.report.charts import operators
from harness.report.data import load
from harness.report.parts import MISSING
from harness.telemetry.operators import GROUPS

ONE, TWO, THREE = ArmPlan("cpu"), ArmPlan("gpu", versus="cpu"), ArmPlan("plain", versus="cpu")


def entry(kind: str, phase: str, group: str, cpu_s: float, device_s: float | None = None) -> dict[str, Any]:
    return {"kind": kind, "phase": phase, "group": group, "calls": 1, "cpu_s": cpu_s, "device_s": device_s}


def profile(prefill: int, decode: int, *rows: dict[str, Any]) -> dict[str, Any]:
    return {
        **{"first_step": 3, "steps": {"prefill": prefill, "decode": decode}, "operators": list(rows)},
        "window_s": {"prefill": 0.030 if prefill else None, "decode": 0.004},
    }


def on_cpu(slow: float) -> dict[str, Any]:
    return profile(
        *(2, 4),
        *(entry("prefill", "forward", "linear", 0.05 * slow), entry("prefill", "schedule", "host", 0.01 * slow)),
        *(entry("decode", "forward", "linear", 0.012 * slow), entry("decode", "propose", "linear", 0.004 * slow)),
        *(entry("decode", "forward", "attention", 0.004), entry("decode", "", "host", 0.002)),
    )


ON_GPU = profile(
    *(0, 2),
    *(entry("decode", "forward", "linear", 0.001, 0.006), entry("decode", "forward", "head", 0.001, 0.002)),
    *(entry("decode", "prepare", "host", 0.003, 0.001), entry("decode", "forward", "host", 0.007, 0.0)),
)


def percent(shares: list[float | None]) -> list[float | None]:
    return [None if share is None else pytest.approx(100 * share, abs=1e-3) for share in shares]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_plan(tmp_path, (ONE, TWO, THREE), 3, 1)
    for trial, slow in enumerate((1.0, 2.0, 5.0)):
        write_measured(tmp_path, "ladder", ONE, trial, 2, profile=on_cpu(slow))
    write_measured(tmp_path, "ladder", TWO, 0, 2, profile=ON_GPU)
    write_measured(tmp_path, "ladder", TWO, 1, 2, profile=profile(1, 1), status="failed", reasons=["by hand"])
    write_measured(tmp_path, "ladder", THREE, 0, 2)
    return tmp_path


def test_bars_are_shares_by_group_and_the_table_says_how_many(run: Path) -> None:
    chart = operators.chart(load(run))
    assert chart.layout["yaxis"]["ticktext"] == ["cpu \u00b7 prefill", "cpu \u00b7 decode", "gpu \u00b7 decode"]
    assert {trace["name"]: trace["x"] for trace in chart.traces} == {
        "linear layers": percent([50 / 60, 8 / 9.5, 3 / 6]),
        "LM head": percent([None, None, 1 / 6]),
        "attention": percent([None, 1 / 9.5, None]),
        "host": percent([10 / 60, 0.5 / 9.5, 2 / 6]),  # on a GPU what is left of a step's 6 ms when no kernel ran
    }
    columns = ("arm", "steps", "profiled (n)", "in the window (ms)", "in the profile (ms)")
    groups = ("linear layers (ms)", "LM head (ms)", "attention (ms)", "host (ms)")
    assert tuple(chart.table.columns) == (*columns, *groups)
    assert [[cell.text for cell in row] for row in chart.table.rows] == [
        ["cpu", "prefill", "6", "30.00", "60.00", "50.00", MISSING, MISSING, "10.00"],
        ["cpu", "decode", "12", "4.00", "9.50", "8.00", MISSING, "1.00", "0.50"],
        ["gpu", "decode", "2", "4.00", "6.00", "3.00", "1.00", MISSING, "2.00"],
    ]


def test_the_chart_stands_in_the_page_only_where_something_was_profiled(run: Path, tmp_path_factory: Any) -> None:
    assert "operators" in Page(build(run)).specs
    bare = tmp_path_factory.mktemp("bare")
    write_plan(bare, (THREE,), 1, 1)
    write_measured(bare, "ladder", THREE, 0, 2)
    assert "operators" not in Page(build(bare)).specs


def test_every_group_of_the_records_is_drawn() -> None:
    assert tuple(operators.GROUPS) == GROUPS
