"""Telemetry as it is drawn: under the steps; clocks held back and why, PCIe traffic, and what the sampling took."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulated_run import ArmPlan, taken, write_measured, write_plan

from harness.records import read_trial, write_trial
from harness.report.charts import telemetry
from harness.report.data import load
from harness.report.parts import MISSING, Chart

ONE_GPU, TWO_GPUS, NONE = ArmPlan("one"), ArmPlan("two"), ArmPlan("cpu")
HELD_BACK = "GPU clocks held back (100 % is yes)"
PCIE = ("PCIe, sent by the GPU", "PCIe, received by the GPU")


def chart_of(run_dir: Path, gpus: dict[ArmPlan, int]) -> Chart:
    write_plan(run_dir, tuple(gpus), 1, 6)
    for plan, count in gpus.items():
        write_measured(run_dir, "ladder", plan, 0, 6, gpus=count)
    return telemetry.chart(load(run_dir))


def panels(chart: Chart) -> dict[str, str]:
    """Title -> y axis."""
    return {note["text"]: f"y{i + 1}" if i else "y" for i, note in enumerate(chart.layout["annotations"])}


def rows(chart: Chart, source: str) -> dict[str, list[str]]:
    return {row[2].text: [cell.text for cell in row[3:]] for row in chart.table.rows if row[1].text == source}


def test_clocks_held_back_are_drawn_and_their_reasons_named(tmp_path: Path) -> None:
    chart = chart_of(tmp_path, {ONE_GPU: 1})
    (line,) = (trace for trace in chart.traces if trace["yaxis"] == panels(chart)[HELD_BACK])
    wanted = np.resize([0.0, 100.0, 0.0, 100.0], len(line["y"]))
    assert len(wanted) > 8 and line["y"] == wanted.tolist()
    told = rows(chart, "gpu0")[f"{HELD_BACK} (%): software power cap, software thermal slowdown"]
    assert told == [f"{wanted.mean():.1f}", "100.0", str(len(wanted))]


def test_pcie_traffic_is_drawn_for_each_gpu(tmp_path: Path) -> None:
    chart = chart_of(tmp_path, {TWO_GPUS: 2})
    for title in PCIE:
        lines = [trace for trace in chart.traces if trace["yaxis"] == panels(chart)[title]]
        assert len(lines) == 2 and all(1 <= value <= 4 for trace in lines for value in trace["y"])
    assert f"{PCIE[0]} (GB/s)" in rows(chart, "gpu1")


def test_a_machine_without_a_gpu_has_no_such_panel(tmp_path: Path) -> None:
    chart = chart_of(tmp_path, {NONE: 0})
    assert len(panels(chart)) == 3 + len(telemetry.OF_STEPS) and not {HELD_BACK, *PCIE} & set(panels(chart))


def test_what_the_machine_did_stands_under_what_the_steps_did_on_one_axis_of_time(tmp_path: Path) -> None:
    chart = chart_of(tmp_path, {NONE: 0, ONE_GPU: 0})
    assert list(panels(chart))[:3] == [series.meaning for series in telemetry.OF_STEPS]
    axes = [axis["range"] for name, axis in chart.layout.items() if name.startswith("xaxis")]
    steps = read_trial(tmp_path / NONE.name / "0").steps
    assert len(axes) == 6 and all(each == axes[0] for each in axes) and axes[0][1] >= steps["end_s"].max()
    for series in telemetry.OF_STEPS:
        line = next(t for t in chart.traces if t["name"] == NONE.name and t["yaxis"] == panels(chart)[series.meaning])
        wanted = steps.set_index(steps["start_s"].round(3))[series.name]
        assert line["y"] == wanted[line["x"]].tolist()
    assert steps["running"].nunique() > 2
    sampled = next(t for t in chart.traces if t["yaxis"] == panels(chart)["CPU of the host (100 % is every core)"])
    assert min(sampled["x"]) >= 0 and max(sampled["x"]) <= axes[0][1]


def test_workers_whose_steps_overlap_have_lines_of_their_own(tmp_path: Path) -> None:
    write_plan(tmp_path, (NONE,), 1, 6)
    write_measured(tmp_path, "ladder", NONE, 0, 6)
    folder = tmp_path / NONE.name / "0"
    run, requests, steps, sampled = taken(folder)
    steps["worker"] = ["prefill 0" if i % 3 else "decode 0" for i in range(len(steps))]
    write_trial(folder, run, requests, steps, sampled)
    chart = telemetry.chart(load(tmp_path))
    lines = [t for t in chart.traces if t["yaxis"] == panels(chart)["sequences running"]]
    assert [len(line["y"]) for line in lines] == [-(-len(steps) // 3), len(steps) - -(-len(steps) // 3)]
    assert {"sequences running", "requests waiting"} < set(rows(chart, "steps decode 0"))


def test_what_sampling_took_is_told(tmp_path: Path) -> None:
    chart = chart_of(tmp_path, {NONE: 0})
    times = load(tmp_path).arms[0].trials[0].telemetry["t_s"]
    share = 100 * 0.004 / (times.max() - times.min())
    assert f"at most {share:.2f} % of a core" in chart.note
    assert rows(chart, "sampling") == {
        "its own CPU time (% of a core)": [f"{share:.2f}", MISSING, "20"],
        "length of a round (ms)": ["0.20", "1.00", "20"],
    }


def test_a_record_that_does_not_say_what_sampling_took(tmp_path: Path) -> None:
    write_plan(tmp_path, (NONE,), 1, 6)
    write_measured(tmp_path, "ladder", NONE, 0, 6)
    path = tmp_path / NONE.name / "0" / "run.json"
    path.write_text(path.read_text().replace('"telemetry_cost"', '"x"'))
    chart = telemetry.chart(load(tmp_path))
    assert chart.traces and "Sampling" not in chart.note and not rows(chart, "sampling")


@pytest.mark.parametrize("bits", [0x0, 0x1, 0x2, 0x3])
def test_an_idle_gpu_or_clocks_that_somebody_set_hold_nothing_back(bits: int) -> None:
    series = next(each for each in telemetry.SERIES if each.name == telemetry.THROTTLE)
    recorded = np.array([float(bits)])
    assert series.values(recorded).tolist() == [0] and series.quantity(recorded) == f"{HELD_BACK} (%)"


def test_a_reason_that_nvml_may_add_is_named_by_its_bit() -> None:
    series = next(each for each in telemetry.SERIES if each.name == telemetry.THROTTLE)
    recorded = np.array([0.0, 4096.0])
    assert series.values(recorded).tolist() == [0, 100] and series.quantity(recorded) == f"{HELD_BACK} (%): 0x1000"
