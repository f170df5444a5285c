"""Two runs against each other, and what the page needs to compare arms: pairs that may not be compared are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from page_reader import Page
from simulated_run import HARDWARE, LADDER, ArmPlan, config_of, run_record, write_measured, write_plan, write_run

from harness.records import RecordError, read_run, write_json
from harness.report.charts import decode_step, kv_memory, latency, speedup, tradeoff
from harness.report.compare import browser_data
from harness.report.compare_filter import tagged
from harness.report.compare_runs import compare, compare_runs
from harness.report.data import Report, load
from harness.report.parts import MISSING
from harness.statistics import T_QUANTILES
from harness.summary import summary_of

ONE, TWO = ArmPlan("one"), ArmPlan("two", speed=1.5)


@pytest.fixture(scope="module")
def report(ladder: Path) -> Report:
    return load(ladder)


def write(run_dir: Path, *plans: ArmPlan, trials: int = 3, **changes: Any) -> Path:
    write_plan(run_dir, plans, trials, 4, study="small")
    for plan in plans:
        for trial in range(trials):
            write_measured(run_dir, "small", plan, trial, 4, **changes)
    return run_dir


# --- two runs ---------------------------------------------------------------------------------------------------------


def test_a_slower_run_is_found_slower_by_the_rules_of_a_study(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", ONE), write(tmp_path / "b", replace(ONE, speed=1.5))
    (found,) = compare_runs(read_run(first), read_run(second))
    one_study = summary_of(read_run(write(tmp_path / "both", ONE, TWO)))["arms"]["two"]["ratios"]
    assert found.reasons == []
    for row in found.metrics:
        assert vars(row.ratio) == one_study[row.metric], row.metric
    speed = next(row for row in found.metrics if row.metric == "output_tokens_per_s")
    assert speed.ratio.verdict == "worse" and speed.first is not None and speed.second is not None
    assert speed.first > 1.3 * speed.second


def test_a_run_against_itself_shows_no_difference(ladder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(ladder, ladder) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "same settings" in printed.out and "1.00x [1.00, 1.00]" in printed.out
    assert "fp8: not comparable\n  emulated" in printed.out  # one arm is refused, the others are compared
    assert "better" not in printed.out and "worse" not in printed.out


def differing(what: str) -> dict[str, Any]:
    config = config_of(ONE, 4)
    changes: dict[str, dict[str, Any]] = {
        "machine": {"provenance": {"hardware": {**HARDWARE, "threads": 4}}},
        "model": {"provenance": {"hardware": HARDWARE, "model": {"fingerprint": "sha256:other"}}},
        "traffic": {"config": {**config, "workload": {**config["workload"], "num_requests": 5}}},
        "clock": {"clock": "virtual"},
        "emulated": {"emulated": ["fp8 in BF16"]},
    }
    return changes[what]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("machine", "machine differs (machine.threads: 2 -> 4)"),
        ("model", "model differs (fingerprint: sha256:ours -> sha256:other)"),
        ("traffic", "traffic differs (workload.num_requests: 4 -> 5)"),
        ("clock", "clock differs (clock: real -> virtual)"),
        ("emulated", "emulated: ['fp8 in BF16']"),
    ],
)
def test_what_is_not_comparable_is_refused_with_its_reason(
    what: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = {"provenance": {"hardware": HARDWARE, "model": {"fingerprint": "sha256:ours"}}} if what == "model" else {}
    first, second = write(tmp_path / "a", ONE, **ours), write(tmp_path / "b", ONE, **differing(what))
    assert compare(first, second) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and said in printed.out
    assert "x [" not in printed.out


def test_what_may_differ_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "a", ONE), write(tmp_path / "b", replace(ONE, max_num_seqs=2))
    assert compare(first, second) == 0
    assert "batching.max_num_seqs: 32 -> 2" in capsys.readouterr().out


def test_the_same_requests_judged_by_other_limits_are_not_compared_by_them(tmp_path: Path) -> None:
    limits = {"name": "interactive", "ttft_s": 2.0, "tpot_s": 0.2}
    runs = []
    for name, ttft_s in (("a", 2.0), ("b", 0.1)):
        config = {**config_of(ONE, 4), "slo": {**limits, "ttft_s": ttft_s}}
        runs.append(read_run(write(tmp_path / name, ONE, config=config)))
    (same,), (other,) = compare_runs(runs[0], runs[0]), compare_runs(*runs)
    assert {"goodput_per_s", "output_tokens_per_s"} <= {row.metric for row in same.metrics}
    assert {"goodput_per_s", "slo_attainment"}.isdisjoint(row.metric for row in other.metrics)
    assert "output_tokens_per_s" in {row.metric for row in other.metrics}


def test_arms_are_matched_by_name_and_two_single_ones_whatever_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, both = write(tmp_path / "a", ONE), write(tmp_path / "b", TWO), write(tmp_path / "c", TWO, ArmPlan("three"))
    assert [(each.first, each.second) for each in compare_runs(read_run(a), read_run(b))] == [("one", "two")]
    assert [each.first for each in compare_runs(read_run(both), read_run(b))] == ["two"]
    assert compare(a, both) == 2
    assert "no arm is in both runs" in capsys.readouterr().err
    with pytest.raises(RecordError):
        compare(a, tmp_path / "nowhere")


def test_without_a_common_trial_there_is_no_ratio(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", ONE, trials=1), tmp_path / "b"
    write_plan(second, (ONE,), 2, 4)
    write_measured(second, "small", ONE, 1, 4)
    (found,) = compare_runs(read_run(first), read_run(second))
    assert found.reasons == ["no trial of one number is ok in both runs"] and found.metrics == []


def test_values_that_leave_no_pair_are_not_said_to_be_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "a", ONE)
    second = write(tmp_path / "b", ONE, more_metrics={"output_tokens_per_s": 0.0})
    assert compare(first, second) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    said = {line[0]: line[-3:] for line in printed if len(line) > 3}
    assert said["output_tokens_per_s"] == [MISSING, "0", MISSING]
    assert said["goodput_per_s"] == ["no", "difference", "shown"]


def test_intervals_of_an_adaptive_run_are_the_stricter_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "a", ONE), write(tmp_path / "b", TWO)
    plan = json.loads((second / "study.json").read_text())
    found = []
    for half_width in (None, 0.03):
        write_json(second / "study.json", {**plan, "half_width": half_width})
        assert compare(first, second) == 0
        found.append((capsys.readouterr().out, compare_runs(read_run(first), read_run(second))[0].metrics[0].ratio))
    (plain, narrow), (adaptive, wide) = found
    assert "Intervals: 95 %." in plain and "Intervals: 98 %." in adaptive and wide.median == narrow.median
    assert wide.low is not None and narrow.low is not None and wide.low < narrow.low


# --- what the page is given -------------------------------------------------------------------------------------------


def test_the_page_has_every_trials_own_values(report: Report) -> None:
    data = json.loads(browser_data(report))
    assert data["arms"][data["baseline"]]["name"] == "static"
    assert (data["confidence"], data["t"]) == (0.95, list(T_QUANTILES[0.95]))
    for arm, given in zip(report.arms, data["arms"], strict=True):
        assert given["trials"] == [trial.run["trial"] for trial in arm.ok]
        assert given["values"]["ttft_s.p99"] == [trial.run["metrics"]["ttft_s"]["p99"] for trial in arm.ok]
        assert "mfu" not in given["values"]  # nobody measured it
        assert given["values"]["decode_rate"] == [t.decode_rate for t in arm.figures.trials]
        assert len(given["values"]["decode.attention"]) == len(given["values"]["linear.4"]) == len(arm.ok)


def test_only_trials_under_the_same_conditions_are_paired(report: Report) -> None:
    data = json.loads(browser_data(report))
    conditions = {arm["name"]: arm["conditions"] for arm in data["arms"]}
    comparable = data["comparable"]
    assert conditions["static"] == conditions["paged"] and len(set(conditions["static"])) == 3  # one traffic a trial
    for trial, i in enumerate(conditions["static"]):
        assert comparable[i][i] == "1"
        assert trial or comparable[i][conditions["fp8"][0]] == "0"  # its speed is emulated


def test_trials_of_a_trace_that_was_another_by_then_are_not_paired(tmp_path: Path) -> None:
    """Same path, same options: the page goes by what was in the file, as the summary does."""
    write_plan(tmp_path, (ONE, TWO), 1, 4, study="small")
    for plan, digest in ((ONE, "1"), (TWO, "2")):
        provenance = run_record("small", plan, 0, 4)["provenance"] | {"workload": {"file_sha256": digest}}
        write_measured(tmp_path, "small", plan, 0, 4, provenance=provenance)
    report = load(tmp_path)
    (one,), (two,) = (arm["conditions"] for arm in json.loads(browser_data(report))["arms"])
    assert json.loads(browser_data(report))["comparable"][one][two] == "0"
    assert report.summary["arms"]["two"]["ratios"]["output_tokens_per_s"]["verdict"] == "not comparable"


def test_an_adaptive_study_keeps_its_stricter_level(report: Report) -> None:
    plan = {**report.plan, "half_width": 0.03}
    adaptive = replace(report, record=replace(report.record, plan=plan))
    data = json.loads(browser_data(adaptive))
    assert (data["confidence"], data["t"]) == (0.98, list(T_QUANTILES[0.98]))


def test_names_cannot_close_the_element_that_holds_the_values(hostile: Path) -> None:
    raw = browser_data(load(hostile))
    assert "<" not in raw and json.loads(raw)["arms"][1]["name"].startswith("</script>")
    tags = Page(hostile / "report.html").tags
    assert [named for tag, named in tags if tag == "script" and named.get("id") == "trials"]


# --- whose is what ----------------------------------------------------------------------------------------------------


def test_traces_rows_panels_and_arrows_know_their_arms(report: Report) -> None:
    arms = report.arms
    curves = tagged(latency.chart(report, latency.TTFT), arms)
    assert [trace["meta"]["arms"] for trace in curves.traces] == [[arm.index] for arm in arms]
    points = tagged(tradeoff.chart(report), arms)
    frontier, *medians_and_trials = points.traces
    assert sorted(frontier["meta"]["points"]) == [arm.index for arm in arms if not arm.emulated]
    assert [trace["meta"]["arms"] for trace in medians_and_trials] == [[arm.index] for arm in arms for _ in (0, 1)]
    names = [arm.name for arm in arms]
    steps = [[[names.index(a)], [names.index(b)]] for b, a in (("static", "continuous"), ("continuous", "paged"))]
    assert points.layout["meta"]["arrows"][:2] == steps
    rows = tagged(decode_step.chart(report), arms).layout["meta"]["rows"]
    assert rows == [[arm.index] for arm in arms]
    assert tagged(kv_memory.chart(report), arms).layout["meta"]["panels"] == [[arm.index] for arm in arms]
    measured = tagged(speedup.chart(report), arms)
    drafting = names.index("speculative")
    assert measured.layout["meta"]["rows"] == [[drafting]]
    assert measured.traces[1]["meta"] == {"follows": "decode_rate", "points": [drafting]}


def test_names_that_are_shortened_alike_belong_to_both(tmp_path: Path) -> None:
    long = "x" * 50
    plans = [replace(LADDER[2], name=name, versus=None) for name in (f"{long}-a", f"{long}-b")]
    report = load(write_run(tmp_path, plans, trials=1, num_requests=4))
    assert tagged(kv_memory.chart(report), report.arms).layout["meta"]["panels"] == [[0, 1], [0, 1]]
