"""Fewer bytes for weights or K/V: speed and quality in their chart, quality and prefix hits beside the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from page_reader import Page
from simulated_run import BUDGET_TOKENS, LADDER, ArmPlan, taken, write_measured, write_plan, write_run

from harness.records import TrialRecord, read_json, read_trial, write_json, write_trial
from harness.report import build
from harness.report.charts.precision import KEYS_AND_VALUES, WEIGHTS, chart, families
from harness.report.charts.verdict_columns import columns, headings
from harness.report.data import Report, load
from harness.report.equal_burst import phase_rates
from harness.report.parts import MISSING, Chart
from harness.report.tables import table
from harness.summary import summarize

QUALITY = {
    "bf16": {"perplexity": 17.5, "kl_vs_bf16": 0.0, "top1_agreement": 1.0},
    "int8": {"perplexity": 17.625, "kl_vs_bf16": 0.00125, "top1_agreement": 0.985},
}
WEIGHT_BYTES = {"bf16": 325e6, "int8": 200e6}


def write_qualities(run_dir: Path, plans: tuple[ArmPlan, ...], trials: int = 2) -> Path:
    """Each option's quality, measured in its first trial alone."""
    write_plan(run_dir, plans, trials, 4)
    for plan in plans:
        of = "int8" if "int8" in (plan.precision, plan.kv_dtype) else "bf16"
        for trial in range(trials):
            quality = QUALITY[of] if trial == 0 else {}
            more = {**quality, "weights_bytes": WEIGHT_BYTES[plan.precision]}
            write_measured(run_dir, "ladder", plan, trial, 4, more)
    return run_dir


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Report:
    plans = (ArmPlan("bf16"), ArmPlan("int8", precision="int8", speed=0.8))
    return load(write_qualities(tmp_path_factory.mktemp("quantised"), plans))


def drawn(found: Chart) -> dict[tuple[str, str], tuple[list[Any], list[Any]]]:
    """(arm, y axis) -> the point of its median or quality."""
    points = [t for t in found.traces if "opacity" not in t and t["mode"] != "lines"]
    return {(t["name"], t.get("yaxis", "y")): (t["x"], t["y"]) for t in points}


def test_precision_is_compared_where_nothing_else_differs(ladder: Path) -> None:
    report = load(ladder)
    named = [[arm.name for arm in family] for family in families(report.arms, "precision")]
    assert named == [["paged", "int8", "fp8"]]
    found = chart(report, WEIGHTS)
    medians = {t["name"]: t for t in found.traces if t["mode"] == "markers+text"}
    assert [t["text"] for t in medians.values()] == [["bf16"], ["int8"], ["fp8 (emulated)"]]
    for arm in report.arms[3:]:
        if arm.name in medians:
            assert medians[arm.name]["y"] == [pytest.approx(arm.metrics["output_tokens_per_s"], abs=1e-5)]
            assert medians[arm.name]["x"] == [325.0]
    (rate,), bars = medians["int8"]["y"], medians["int8"]["error_y"]
    low, high = rate - bars["arrayminus"][0], rate + bars["array"][0]
    assert found.table.rows[1][4].text == f"{rate:,.1f} [{low:,.1f}, {high:,.1f}]"
    assert medians["fp8"]["marker"]["symbol"].endswith("-open") and "fp8" in found.note
    assert not medians["int8"]["marker"]["symbol"].endswith("-open")
    assert "No quality was measured" in found.note and "yaxis2" not in found.layout


def test_one_precision_is_nothing_to_compare(tmp_path: Path) -> None:
    found = chart(load(write_run(tmp_path, LADDER[:3], trials=1, num_requests=4)), WEIGHTS)
    assert not found.traces and "precision alone" in found.empty


def test_quality_that_was_measured_is_drawn_under_the_bytes_that_it_costs(quantised: Report) -> None:
    found = chart(quantised, WEIGHTS)
    points = drawn(found)
    for arm, megabytes in (("bf16", 325.0), ("int8", 200.0)):
        expected = (QUALITY[arm]["perplexity"], QUALITY[arm]["kl_vs_bf16"], 100 * QUALITY[arm]["top1_agreement"])
        for axis, value in zip(("y2", "y3", "y4"), expected, strict=True):
            assert points[arm, axis] == ([megabytes], [pytest.approx(value)]), (arm, axis)
    titles = [found.layout[f"yaxis{i}"]["title"]["text"] for i in (2, 3, 4)]
    assert titles == ["perplexity", "KL to bf16 (nat)", "top-1 agreement (%)"]
    ends = [end for i in ("", 2, 3, 4) for end in reversed(found.layout[f"yaxis{i}"]["domain"])]
    assert (
        ends == sorted(ends, reverse=True) and ends[-1] == pytest.approx(0) and found.layout["xaxis"]["anchor"] == "y4"
    )
    row = dict(zip(found.table.columns, [cell.text for cell in found.table.rows[1]], strict=True))
    assert (row["precision"], row["weights"], row["perplexity"]) == ("int8", "200 MB", "17.625")
    assert (row["KL to bf16 (nat)"], row["top-1 agreement (%)"], row["equal output"]) == ("0.00125", "98.5 %", MISSING)


def test_quality_has_the_interval_over_its_texts_if_these_are_enough(tmp_path: Path) -> None:
    plans = (ArmPlan("two texts"), ArmPlan("three texts", precision="int8"))
    ends = {"perplexity": (17.0, 18.5), "kl_vs_bf16": (-0.001, 0.002), "top1_agreement": (0.98, 0.99)}
    write_plan(tmp_path, plans, 1, 4)
    for texts, plan in enumerate(plans, start=2):
        quality = {name: {"low": low, "high": high} for name, (low, high) in ends.items()}
        write_measured(tmp_path, "ladder", plan, 0, 4, QUALITY["int8"], quality={"texts": texts, **quality})
    found = chart(load(tmp_path), WEIGHTS)
    points = {(t["name"], t["yaxis"]): t for t in found.traces if "yaxis" in t}
    for axis, scale, (low, high) in zip(("y2", "y3", "y4"), (1, 1, 100), ends.values(), strict=True):
        assert points["two texts", axis]["error_y"]["array"] == [None]
        (value,), bars = points["three texts", axis]["y"], points["three texts", axis]["error_y"]
        assert value - bars["arrayminus"][0] == pytest.approx(scale * low, abs=1e-5)
        assert value + bars["array"][0] == pytest.approx(scale * high, abs=1e-5)
        assert bars["color"] == points["three texts", axis]["marker"]["color"]
    assert [[cell.text for cell in row[-4:-1]] for row in found.table.rows] == [
        ["17.625", "0.00125", "98.5 %"],
        ["17.625 [17.000, 18.500]", "0.00125 [-0.00100, 0.00200]", "98.5 % [98.0 %, 99.0 %]"],
    ]
    assert "95 %, over the texts" in found.note


def test_kv_dtypes_are_compared_by_what_a_token_takes_of_the_budget(tmp_path: Path) -> None:
    plans = (ArmPlan("bf16"), ArmPlan("int8 kv", kv_dtype="int8", speed=0.9), ArmPlan("int8", precision="int8"))
    write_qualities(tmp_path, plans)
    report = load(tmp_path)
    found = chart(report, KEYS_AND_VALUES)
    points = drawn(found)
    assert {arm for arm, _ in points} == {"bf16", "int8 kv"}
    assert points["bf16", "y"][0] == [23.04] and points["int8 kv", "y"][0] == [11.52]
    assert points["int8 kv", "y2"] == ([11.52], [17.625])
    row = dict(zip(found.table.columns, [cell.text for cell in found.table.rows[1]], strict=True))
    assert (row["kv dtype"], row["K/V of a token"]) == ("int8", "11.5 kB")
    assert report.arms[1].shown is not None
    assert report.arms[1].shown.steps["kv_capacity_tokens"].max() == 2 * BUDGET_TOKENS
    assert "kvdtype" in Page(build(tmp_path)).specs


def test_a_page_of_one_kv_dtype_has_no_chart_of_them(quantised: Report) -> None:
    assert "kvdtype" not in Page(build(quantised.record.path)).specs


def test_families_that_differ_otherwise_have_a_line_each(tmp_path: Path) -> None:
    plans = tuple(
        ArmPlan(f"{precision} b{batch}", max_num_seqs=batch, precision=precision)
        for batch in (1, 8)
        for precision in ("bf16", "int8")
    )
    found = chart(load(write_qualities(tmp_path, plans, trials=1)), WEIGHTS)
    lines = [t for t in found.traces if t["mode"] == "lines"]
    assert [t["x"] for t in lines] == [[200.0, 325.0]] * 2 and [t["meta"]["points"] for t in lines] == [[1, 0], [3, 2]]


# --- beside the verdict -----------------------------------------------------------------------------------------------


def test_quality_stands_in_the_verdict_where_it_was_measured(quantised: Report, ladder: Path) -> None:
    shown = columns(quantised)
    assert [c.heading for c in shown if c.group == "quality"] == ["perplexity", "KL (nat)", "top-1"]
    assert [[c.cell(arm).text for c in shown if c.group == "quality"] for arm in quantised.arms] == [
        ["17.50", "0.0000", "100.0 %"],
        ["17.62", "0.0013", "98.5 %"],
    ]
    assert ("quality", ["perplexity", "KL (nat)", "top-1"]) in headings(shown)
    others = [column.heading for column in columns(load(ladder))]
    assert "perplexity" not in others and "planned" not in others and "acceptance" in others


def test_prefix_hits_stand_in_the_verdict_planned_and_observed(tmp_path: Path) -> None:
    plans = (ArmPlan("off"), ArmPlan("radix", versus="off"))
    write_plan(tmp_path, plans, 2, 4)
    for trial in range(2):
        write_measured(tmp_path, "prefix", plans[0], trial, 4, {"prefix_hit_rate_planned": 0.7})
        hits = {"prefix_hit_rate_planned": 0.7, "prefix_hit_rate_observed": 0.65 + 0.02 * trial}
        write_measured(tmp_path, "prefix", plans[1], trial, 4, hits)
    summarize(tmp_path)
    report = load(tmp_path)
    shown = [column for column in columns(report) if column.group == "prefix hits"]
    assert [c.heading for c in shown] == ["planned", "observed", "cache"]  # these prompts repeat no whole block
    assert [[c.cell(arm).text for c in shown] for arm in report.arms] == [
        ["70.0 %", MISSING, "3,072"],
        ["70.0 %", "66.0 %", "3,072"],
    ]
    page = Page(build(tmp_path))
    cells = {source[2]: text for source, _, text in page.cells if source[:2] == ("radix", "metrics")}
    assert (cells["prefix_hit_rate_planned"], cells["prefix_hit_rate_observed"]) == ("70.0", "66.0")  # of every metric
    start = page.text.index("Verdict")
    assert "prefix hits" in page.text[start : page.text.index("Every metric")]


def test_a_missing_quality_is_no_zero(quantised: Report) -> None:
    cells = table(chart(quantised, WEIGHTS).table).split("<td")
    (equal_output,) = (cell for cell in cells if "int8" in cell and "equivalence" in cell)
    assert MISSING in equal_output and "data-value" not in equal_output
    assert sum("data-value" in cell and "perplexity" in cell for cell in cells) == 2


# --- what stands beside the figures -----------------------------------------------------------------------------------


def equal_burst(run_dir: Path, prompts: list[int], outputs: list[int], steps: list[tuple[int, int]]) -> TrialRecord:
    """A trial with these requests and steps (prefill, decode tokens), a TTFT of 0.5 s and an ITL of 20 ms."""
    write_run(run_dir, [ArmPlan("a")], trials=1, num_requests=len(prompts))
    run, requests, rows, telemetry = taken(run_dir / "a" / "0")
    run["metrics"]["ttft_s"]["p50"], run["metrics"]["itl_s"]["p50"] = 0.5, 0.02
    requests = requests.assign(prompt_tokens=prompts, output_tokens=outputs)
    rows = rows.iloc[: len(steps)].assign(
        prefill_tokens=[prefill for prefill, _ in steps], decode_tokens=[decode for _, decode in steps]
    )
    write_trial(run_dir / "a" / "0", run, requests, rows, telemetry)
    return read_trial(run_dir / "a" / "0")


@pytest.mark.parametrize(
    ("prompts", "outputs", "steps", "expected"),
    [
        ([64, 64], [8, 8], [(128, 0), (0, 2), (0, 2)], (256.0, 100.0)),
        ([64, 32], [8, 8], [(96, 0), (0, 2), (0, 2)], None),
        ([64, 64], [8, 9], [(128, 0), (0, 2), (0, 2)], None),
        ([64, 64], [8, 8], [(64, 0), (64, 1), (0, 2)], None),
        ([64, 64], [8, 8], [(100, 0), (0, 2), (0, 2)], None),  # a part was found in the prefix cache
    ],
)
def test_prefill_and_decode_rates_are_those_of_a_burst_of_equal_requests(
    tmp_path: Path,
    prompts: list[int],
    outputs: list[int],
    steps: list[tuple[int, int]],
    expected: tuple[float, float] | None,
) -> None:
    found = phase_rates(equal_burst(tmp_path, prompts, outputs, steps))
    assert found == (None if expected is None else pytest.approx(expected))


def test_the_table_has_both_rates_where_the_traffic_tells_them_apart(quantised: Report, tmp_path: Path) -> None:
    assert "prefill tok/s" not in chart(quantised, WEIGHTS).table.columns
    write_qualities(tmp_path, (ArmPlan("bf16"), ArmPlan("int8", precision="int8")), trials=1)
    equal_burst(tmp_path / "other", [64, 64, 64], [8, 8, 8], [(192, 0), (0, 3)])
    run = read_trial(tmp_path / "other/a/0")
    write_trial(tmp_path / "int8/1", run.run | {"arm": "int8", "trial": 1}, run.requests, run.steps, run.telemetry)
    found = chart(load(tmp_path), WEIGHTS)
    rows = [dict(zip(found.table.columns, [cell.text for cell in row], strict=True)) for row in found.table.rows]
    rates = [(row["prefill tok/s"], row["decode tok/s"]) for row in rows]
    assert rates == [(MISSING, MISSING), ("384", "150")] and "prefill tok/s is prompt tokens / TTFT" in found.note


def test_the_note_says_whose_channels_were_permuted_and_why(tmp_path: Path) -> None:
    plans = (ArmPlan("bf16"), ArmPlan("int8", precision="int8"), ArmPlan("int4 as stored", precision="int4"))
    write_run(tmp_path, plans, trials=1, num_requests=4)
    assert "permutation" not in chart(load(tmp_path), WEIGHTS).note
    for arm, seed in (("int8", 0), ("int4 as stored", None)):
        path = tmp_path / arm / "0" / "run.json"
        run = read_json(path)
        run["config"]["precision"]["permutation_seed"] = seed
        write_json(path, run)
    note = chart(load(tmp_path), WEIGHTS).note
    assert "seeded permutation that changes no output (not of int4 as stored)" in note and "4-bit grid" in note
    assert "permutation" not in chart(load(tmp_path), KEYS_AND_VALUES).note
