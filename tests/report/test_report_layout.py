"""What stands where: names off one another, legends beside crowds, wide figures, and nothing where nothing is."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from page_reader import Page
from simulated_run import ArmPlan, run_record, write_measured, write_plan, write_run

from harness.records import write_trial
from harness.report import build
from harness.report.charts import gantt, latency, telemetry, tradeoff
from harness.report.charts.notices import enumerated
from harness.report.charts.verdict import rows
from harness.report.charts.verdict_columns import columns
from harness.report.data import load
from harness.report.intervals import room
from harness.report.legends import FEW, legend
from harness.report.page import placed as laid_out
from harness.report.parts import MISSING, Chart, Table, counted
from harness.report.placing import PLACES, Named, drawn, name_box, placed
from harness.report.tables import breakable

SIZE_PX = 570.0, 330.0
NEEDS_A_GPU = "execution=cuda_graph needs a CUDA device"


def point(name: str, x: float, y: float, up: float | None = None) -> Named:
    """``x``, ``y``: on axes that end at 100; ``up``: half its interval."""
    return Named(name, x, y, (None, None), (None, None) if up is None else (y - up, y + up))


def places_of(points: list[Named]) -> list[str]:
    return placed(points, (100.0, 100.0), SIZE_PX)


# --- names of points --------------------------------------------------------------------------------------------------


def test_names_of_points_that_lie_together_do_not_cover_one_another_or_a_marker() -> None:
    points = [point("int8", 31, 90), point("paged", 26, 86), point("speculative", 29, 88)]
    scale = SIZE_PX[0] / 100, SIZE_PX[1] / 100
    boxes = [name_box(each, place, scale) for each, place in zip(points, places_of(points), strict=True)]
    assert not any(a.shared(b) for a, b in combinations(boxes, 2))
    assert not any(box.shared(mark) for box in boxes for each in points for mark in drawn(each, scale))


def test_names_at_one_place_rather_stand_on_intervals_than_on_one_another() -> None:
    points = [Named(f"an arm of some name {i}", 50, 60, (20, 80), (30, 90)) for i in range(6)]  # four go beside them
    scale = SIZE_PX[0] / 100, SIZE_PX[1] / 100
    boxes = [name_box(each, place, scale) for each, place in zip(points, places_of(points), strict=True)]
    assert not any(a.shared(b) > 0.05 * a.area for a, b in combinations(boxes, 2))  # edges may touch


def test_a_name_leaves_its_interval_and_stays_within_the_figure() -> None:
    (beside,) = places_of([point("a", 50, 50, up=30)])
    assert beside not in ("top center", "bottom center")
    right, left = places_of([point("at the right", 99, 50), point("at the left", 1, 20)])
    assert right.endswith("left") and left.endswith("right")


def test_the_arms_of_a_ladder_are_named_at_their_points(ladder: Path) -> None:
    found = tradeoff.chart(load(ladder))
    named = [trace for trace in found.traces if trace["mode"] == "markers+text"]
    assert len(named) == 6 and {trace["textposition"] for trace in named} <= PLACES.keys()
    assert found.layout["showlegend"] is False and not found.wide


def test_an_axis_has_room_for_intervals_but_not_for_wild_ones() -> None:
    assert room([10.0, 20.0], [None, 21.0]) == pytest.approx(22.8)  # a label above the highest point
    assert room([20.0], [30.0, None]) == pytest.approx(31.5)
    assert room([20.0], [3000.0, float("inf")]) == pytest.approx(34.0)
    assert room([20.0], [float("nan"), 25.0]) == pytest.approx(26.25)


# --- crowds -----------------------------------------------------------------------------------------------------------


def test_a_crowd_is_named_beside_a_figure_that_goes_across_the_page() -> None:
    few, many = legend(FEW, 400), legend(31, 400)
    assert (few.height, few.wide, few.layout["legend"]["orientation"]) == (400, False, "h")
    assert many.wide and many.height >= 31 * 20 and "orientation" not in many.layout["legend"]
    assert legend(1000, 400).height < 1500  # the rest scrolls


def test_every_figure_with_a_name_for_each_of_many_arms_is_wide(tmp_path: Path) -> None:
    report = load(write_run(tmp_path, [ArmPlan(f"arm{i}") for i in range(13)], trials=1, num_requests=4))
    assert tradeoff.chart(report).wide and latency.chart(report, latency.E2E).wide
    assert not latency.chart(load(write_run(tmp_path / "few", [ArmPlan("a")], 1, 4)), latency.E2E).wide


def test_two_stand_beside_one_another_unless_they_are_wide_or_left_over() -> None:
    def of(text: str) -> list[Chart]:
        return [Chart(c, c, "", Table((), ()), () if c == "-" else ({"x": [1]},), wide=c.isupper()) for c in text]

    shapes = {text: "".join(c.key.upper() if c.wide else c.key for c in laid_out(of(text))) for text in ("ab", "abc")}
    assert shapes == {"ab": "ab", "abc": "abC"}
    assert [(c.key, c.wide) for c in laid_out(of("aBcd-e"))] == [
        *(("a", True), ("B", True)),
        *(("c", False), ("d", False), ("e", True)),
    ]
    assert laid_out(of("-")) == []


def test_telemetry_has_its_panels_beside_one_another_without_overlap(tmp_path: Path) -> None:
    write_plan(tmp_path, [ArmPlan("one")], 1, 4)
    write_measured(tmp_path, "ladder", ArmPlan("one"), 0, 4, gpus=1)
    found = telemetry.chart(load(tmp_path))
    axes = [name.removeprefix("xaxis") for name in found.layout if name.startswith("xaxis")]
    boxes = [(*found.layout[f"xaxis{axis}"]["domain"], *found.layout[f"yaxis{axis}"]["domain"]) for axis in axes]
    assert found.wide and len(boxes) == 11
    inner = found.height - found.layout["margin"]["t"] - found.layout["margin"]["b"]
    for (left, right, low, high), (l2, r2, low2, high2) in combinations(boxes, 2):
        apart = max(low2 - high, low - high2) * inner
        assert right < l2 or r2 < left or apart >= telemetry.TITLE_PX + telemetry.TICKS_PX - 1
    titled = {axis for axis in axes if "title" in found.layout[f"xaxis{axis}"]}
    assert titled == set(axes[-3:])  # the lowest panel of each column


def test_few_requests_have_low_panels_and_whole_numbers(tmp_path: Path) -> None:
    chart = gantt.chart(load(write_run(tmp_path, [ArmPlan("a")], trials=1, num_requests=1)))
    assert chart.layout["yaxis"]["dtick"] == 1 and "1 request" in chart.layout["annotations"][0]["text"]
    assert "requests" not in chart.layout["annotations"][0]["text"] and chart.height < 150
    assert (counted(1, "slot"), counted(1024, "slot")) == ("1 slot", "1,024 slots")


def test_names_are_listed_while_they_can_be_read() -> None:
    names = ["a" * 28, "b" * 30, "c"]
    assert enumerated(names[:2]) == ", ".join(names[:2]) and enumerated(names) == "3 arms"
    assert enumerated(["d" * 99]) == "d" * 99


# --- what is not there ------------------------------------------------------------------------------------------------


def test_a_chart_without_anything_to_show_is_named_at_the_end_alone(tmp_path: Path, ladder: Path) -> None:
    page = Page(build(write_run(tmp_path, [ArmPlan("a")], trials=1, num_requests=4)))
    assert page.text.index("Charts without anything to show") < page.text.index("No arm drafts tokens.")
    figures = [named.get("id") for tag, named in page.tags if tag == "figure"]
    assert set(figures) == page.specs.keys() and "speculation" not in figures
    assert "Charts without anything to show" not in Page(ladder / "report.html").text


def test_arms_that_did_not_run_for_one_reason_are_one_row(tmp_path: Path) -> None:
    graphs = [ArmPlan(f"graph_{i}") for i in range(3)]
    plans = (ArmPlan("eager"), *graphs, ArmPlan("huge"))
    write_plan(tmp_path, plans, 1, 4)
    write_measured(tmp_path, "ladder", plans[0], 0, 4)
    for plan in plans[1:]:
        reason = "needs 810 GB, has 141 GB" if plan.name == "huge" else NEEDS_A_GPU
        record = run_record("ladder", plan, 0, 4, status="not_run", reasons=[reason])
        write_trial(tmp_path / plan.name / "0", record)
    found = rows(load(tmp_path))
    assert [[arm.name for arm in row.arms] for row in found] == [["eager"], [p.name for p in graphs], ["huge"]]
    page = Page(build(tmp_path))
    assert page.text.count(NEEDS_A_GPU) == page.text.count("needs 810 GB") == 1  # and not in the notices again
    assert "3 arms" in page.text and "graph_0, graph_1, graph_2" in page.text
    assert [named["data-arms"] for tag, named in page.tags if "data-arms" in named] == ["0", "1 2 3", "4"]
    assert [row[0].text for row in latency.chart(load(tmp_path), latency.TTFT).table.rows] == ["eager"]


def test_how_long_it_took_to_be_ready_stands_in_the_verdict(tmp_path: Path) -> None:
    plans = (ArmPlan("old"), ArmPlan("new"))
    write_plan(tmp_path, plans, 1, 4)
    write_measured(tmp_path, "ladder", plans[0], 0, 4, {"startup_s": 3.04})
    write_measured(tmp_path, "ladder", plans[1], 0, 4, {"startup_s": 3.04, "ready_s": 41.25})
    report = load(tmp_path)
    shown = [column for column in columns(report) if column.group == "ready (s)"]
    assert [[column.cell(arm).text for column in shown] for arm in report.arms] == [["3.0", MISSING], ["3.0", "41.2"]]


def test_long_names_may_break_where_their_words_end() -> None:
    assert breakable("int8_b1") == "int8_<wbr>b1" and breakable("a.b=c_d", ".") == "a.<wbr>b=c_d"
    assert breakable("<b>_x") == "&lt;b&gt;_<wbr>x"
