"""Latency and goodput against the arrival rate, and the study that measures them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from simulated_run import ArmPlan, config_of, write_measured, write_plan

from harness.records import decode_numbers
from harness.report import build
from harness.report.charts.load import PANELS, chart, offered_rate, sweeps
from harness.report.data import load
from harness.report.intervals import INTERVAL_FROM
from harness.report.page import render
from harness.statistics import ADAPTIVE_CONFIDENCE, interval
from harness.study import compose_study
from harness.summary import summarize

SLO = {"name": "interactive", "ttft_s": 2.0, "tpot_s": 0.2}
RATES = (4.0, 1.5, 8.0)  # not in order


def write_sweep(run_dir: Path, plans: tuple[ArmPlan, ...], rates: tuple[float, ...], trials: int) -> Path:
    arms = [(ArmPlan(f"{plan.name}-{rate}", speed=plan.speed * rate), rate) for plan in plans for rate in rates]
    write_plan(run_dir, [arm for arm, _ in arms], trials, 6, study="load")
    for arm, rate in arms:
        config = {**config_of(arm, 6), "slo": SLO}
        config["workload"] = {**config["workload"], "arrivals": {"name": "poisson", "rate": rate}}
        for trial in range(trials):
            write_measured(run_dir, "load", arm, trial, 6, config=config)
    return run_dir


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = write_sweep(tmp_path_factory.mktemp("load"), (ArmPlan("paged"),), RATES, 3)
    summarize(run_dir)
    build(run_dir)
    return run_dir


def test_medians_stand_at_their_rates_with_their_intervals(swept: Path) -> None:
    report = load(swept)
    found = chart(report)
    points = [y for trace in found.traces if trace["yaxis"] == "y3" for y in trace["y"] if y is not None]
    assert max(points) >= max(RATES) and found.layout["yaxis3"]["range"] == [0, pytest.approx(1.15 * max(points))]
    by_rate = {offered_rate(arm): arm for arm in report.arms}
    for index, panel in enumerate(PANELS):
        axis = "x" if index == 0 else f"x{index + 1}"
        for line in panel.lines:
            drawn = next(t for t in found.traces if (t["name"], t["xaxis"], "error_y" in t) == (line.shown, axis, True))
            assert drawn["x"] == sorted(RATES)
            for i, rate in enumerate(sorted(RATES)):
                arm = by_rate[rate]
                median = arm.metrics[line.metric]
                assert median is not None and drawn["y"][i] == pytest.approx(panel.scale * median, abs=1e-5)
                name, _, part = line.metric.partition(".")
                trials = [t.run["metrics"][name] for t in arm.ok]
                low, high = interval([math.log(t[part] if part else t) for t in trials]) or (math.nan, math.nan)
                assert drawn["y"][i] + drawn["error_y"]["array"][i] == pytest.approx(
                    panel.scale * math.exp(high), abs=1e-4
                )
                assert drawn["y"][i] - drawn["error_y"]["arrayminus"][i] == pytest.approx(
                    panel.scale * math.exp(low), abs=1e-4
                )


def test_the_intervals_have_the_level_that_the_text_says(swept: Path) -> None:
    """That of the kind of study: one that stops by its own intervals reports stricter ones."""
    plain, adaptive = load(swept), load(swept)
    adaptive.record.plan["half_width"] = 0.03
    widths = []
    for report, level in ((plain, "95 %"), (adaptive, "98 %")):
        found = chart(report)
        assert f"with a {level} interval" in found.note
        page = render(report)
        assert (
            f"median and {level} interval" in page and page.count("% interval") == page.count(f"{level} interval") > 1
        )
        line = next(t for t in found.traces if t["name"] == "p50" and "error_y" in t)
        widths.append(line["error_y"]["array"][0] + line["error_y"]["arrayminus"][0])
    trials = [t.run["metrics"]["ttft_s"]["p50"] for t in plain.arms[1].ok]  # the lowest rate
    low, high = (math.exp(end) for end in interval([math.log(t) for t in trials], ADAPTIVE_CONFIDENCE) or (0, 0))
    assert widths[1] == pytest.approx(high - low, abs=1e-4) and widths[1] > 1.2 * widths[0]


def test_the_slo_is_a_line_at_its_limit_in_the_unit_of_its_panel(swept: Path) -> None:
    lines = {t["name"]: (t["y"], t["xaxis"]) for t in chart(load(swept)).traces if t["mode"] == "lines"}
    assert lines["SLO on TTFT: 2 s"] == ([2.0, 2.0], "x")
    assert lines["SLO on TPOT: 200 ms"] == ([200.0, 200.0], "x2")
    (zero, end), axis = lines["as many as offered"]
    assert (zero, axis) == (0.0, "x3") and end > max(RATES)


def test_every_trial_is_shown_and_few_have_no_interval(tmp_path: Path) -> None:
    report = load(write_sweep(tmp_path, (ArmPlan("paged"),), (1.0, 2.0), INTERVAL_FROM - 1))
    for trace in chart(report).traces:
        if "error_y" in trace:
            assert trace["error_y"]["array"] == trace["error_y"]["arrayminus"] == [None, None]
        elif trace["mode"] == "markers" and trace["name"] in ("p50", "p99"):
            assert len(trace["x"]) == len(trace["meta"]["points"]) == 2 * (INTERVAL_FROM - 1)


def test_arms_of_another_technique_have_lines_of_their_own(tmp_path: Path) -> None:
    run_dir = write_sweep(tmp_path, (ArmPlan("one"), ArmPlan("two")), (1.0, 2.0), 1)
    report = load(run_dir)
    for name, arm in report.record.plan["arms"].items():
        arm["overrides"] += [f"batching={name[:3]}", f"workload.arrivals.rate={name[4:]}"]
    found = sweeps(report)
    assert [(name, [arm.name for arm in arms]) for name, arms in found] == [
        ("batching=one", ["one-1.0", "one-2.0"]),
        ("batching=two", ["two-1.0", "two-2.0"]),
    ]
    assert {t["name"] for t in chart(report).traces} >= {"batching=one: p50", "batching=two: p50"}


def test_a_page_without_a_sweep_has_no_load(ladder: Path, swept: Path) -> None:
    assert 'id="spec-load"' in (swept / "report.html").read_text()
    assert 'id="load"' not in (ladder / "report.html").read_text()
    assert chart(load(ladder)).empty and not sweeps(load(ladder))


def test_an_endless_percentile_is_a_gap(tmp_path: Path) -> None:
    report = load(write_sweep(tmp_path, (ArmPlan("paged"),), (1.0, 2.0), 1))
    for arm in report.arms:
        arm.entry["metrics"]["ttft_s.p99"] = decode_numbers("inf")  # type: ignore[index]
    drawn = next(t for t in chart(report).traces if t["name"] == "p99" and t["xaxis"] == "x" and "error_y" in t)
    assert drawn["y"] == [None, None]


def test_a_limit_of_0_has_no_place_on_a_logarithmic_axis(tmp_path: Path) -> None:
    report = load(write_sweep(tmp_path, (ArmPlan("paged"),), (1.0, 2.0), 1))
    for arm in report.arms:
        arm.trials[0].run["config"]["slo"] = {"name": "interactive", "ttft_s": 0.0, "tpot_s": 0.2}
    named = [str(trace["name"]) for trace in chart(report).traces]
    assert [name for name in named if name.startswith("SLO")] == ["SLO on TPOT: 200 ms"]


def test_the_study_offers_the_same_time_of_traffic_from_below_to_beyond_saturation() -> None:
    composed = compose_study(["study=load"])
    rates = []
    for arm in composed.arms:
        workload = composed.configs[arm.name]["workload"]
        assert workload["arrivals"]["name"] == "poisson"
        rates.append(workload["arrivals"]["rate"])
        assert workload["num_requests"] / rates[-1] == pytest.approx(22, rel=0.02)
        rest = {k: v for k, v in composed.configs[arm.name].items() if k != "workload"}
        assert rest == {k: v for k, v in composed.configs[composed.baseline].items() if k != "workload"}
    assert rates == sorted(rates) and rates[-1] > 2 * rates[0] and len(rates) >= 5
    assert len({arm.name for arm in composed.arms}) == len(rates)
