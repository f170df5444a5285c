"""Compare mode in a real browser: another baseline, some of the arms, and the address that keeps both."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Page
from open_report import ALL_DRAWN, COMPARED, CURVES, TALL_PX, VISIBLE, choose, toggle
from simulated_run import LADDER, write_measured, write_plan, write_run

from harness.records import read_json, read_run, write_json
from harness.report import build
from harness.report.against import pairable, ratio_to
from harness.report.charts import decode_step, linear_layers, speedup
from harness.report.charts.verdict import verdict_text
from harness.report.data import Arm, Report, load
from harness.report.parts import MISSING, times
from harness.statistics import Ratio
from harness.summary import summarize, summary_of

METRIC_ROWS = """[...document.querySelectorAll("#metrics tbody tr")].map(r => [...JSON.parse(r.cells[2].dataset.source),
  r.cells[3].dataset.value ?? null, r.cells[3].textContent, r.cells[4].textContent, r.cells[5].textContent])"""
PANELS = "document.querySelector('#chart-kv')._fullLayout.annotations.length"
ARROWS = "document.querySelector('#chart-tradeoff')._fullLayout.annotations.length"
ROWS = "document.querySelector('#chart-steptime')._fullLayout.yaxis.ticktext"


@pytest.fixture(scope="module")
def nine_trials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough trials for intervals of order statistics."""
    run_dir = write_run(tmp_path_factory.mktemp("nine"), LADDER[:5], trials=9, num_requests=6)
    summarize(run_dir)
    build(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def adaptive(ladder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same ladder, had it stopped by its own intervals: all of them have the stricter level."""
    run_dir = tmp_path_factory.mktemp("adaptive") / "run"
    shutil.copytree(ladder, run_dir)
    write_json(run_dir / "study.json", read_json(run_dir / "study.json") | {"half_width": 0.03})
    build(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def one_is_silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An arm without output leaves no pair of output rates, with whichever baseline."""
    run_dir, plans = tmp_path_factory.mktemp("silent"), (LADDER[1], LADDER[2], replace(LADDER[3], name="silent"))
    write_plan(run_dir, plans, 2, 4)
    for trial in range(2):
        for plan in plans:
            more = {"output_tokens_per_s": 0.0} if plan.name == "silent" else {}
            write_measured(run_dir, "ladder", plan, trial, 4, more)
    summarize(run_dir)
    build(run_dir)
    return run_dir


NINE = pytest.param("nine_trials", marks=pytest.mark.slow)


@pytest.mark.parametrize("run", ["ladder", "one_is_silent", NINE])
def test_any_baseline_gives_the_ratios_of_a_summary_with_that_baseline(
    page: Page, run: str, request: pytest.FixtureRequest
) -> None:
    run_dir: Path = request.getfixturevalue(run)
    record = read_run(run_dir)
    page.open(run_dir / "report.html", height=900)
    before = page.evaluate(COMPARED), page.evaluate(METRIC_ROWS)
    for number, baseline in enumerate(record.plan["arms"]):
        choose(page, number)
        arms = summary_of(replace(record, plan={**record.plan, "baseline": baseline}))["arms"]
        for arm, cell in zip(arms, page.evaluate(COMPARED), strict=True):
            if number == 0:
                continue  # the page's own, which it shows as they were
            if arm == baseline:
                assert cell["text"].strip() == "baseline"
                continue
            wanted = arms[arm]["ratios"]["output_tokens_per_s"]
            for part in ("median", "low", "high"):
                assert (part in cell) == (wanted[part] is not None), (arm, part)
                assert part not in cell or float(cell[part]) == pytest.approx(wanted[part], rel=1e-12)
            assert (int(cell["n"]), cell["verdict"]) == (wanted["n"], verdict_text(wanted["n"], wanted["verdict"]))
            assert f"vs {baseline}" in cell["text"]
        for arm, _, metric, value, text, n, verdict in page.evaluate(METRIC_ROWS):
            found = arms[arm]["ratios"].get(metric)
            if found is None or arm == baseline:
                assert (value, text, n, verdict) == (None, "", "", "")
                continue
            assert int(n) == found["n"] and verdict.endswith(verdict_text(found["n"], found["verdict"]))
            assert (None if value is None else float(value)) == (
                None if found["median"] is None else pytest.approx(found["median"], rel=1e-12)
            )
            if found["low"] is not None:
                assert text == f"{found['median']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]"
    choose(page, 0)
    assert (page.evaluate(COMPARED), page.evaluate(METRIC_ROWS)) == before
    assert page.console == []


def test_without_a_pair_nothing_is_said_to_be_alike(page: Page, one_is_silent: Path) -> None:
    page.open(one_is_silent / "report.html", height=900)
    for baseline, without in ((1, (2,)), (2, (0, 1))):
        choose(page, baseline)
        cells, told = page.evaluate(COMPARED), page.evaluate(METRIC_ROWS)
        names = list(read_run(one_is_silent).plan["arms"])
        for arm in without:
            assert (cells[arm]["n"], cells[arm]["verdict"]) == ("0", MISSING) and "difference" not in cells[arm]["text"]
            rates = [row[3:] for row in told if row[:3:2] == [names[arm], "output_tokens_per_s"]]
            assert rates == [[None, MISSING, "0", MISSING]]
    others = [row for row in told if row[0] == names[0] and row[2] == "peak_memory_bytes"]
    assert others[0][-2:] == ["2", "\u2248 no difference shown"]  # of what there are pairs


DRAWN_RATIOS = """(({x, error_x: {array, arrayminus}}) => x.map((m, i) =>
  [m, arrayminus[i] === null ? null : m - arrayminus[i], array[i] === null ? null : m + array[i]]
  ))(document.querySelector('#chart-speedup').data[1])"""
NUMBERS = """['speedup', 'decode', 'linear'].map(key =>
  [...document.querySelectorAll(`#${key} tbody tr`)].map(row => [...row.cells].map(cell => cell.textContent)))"""


@pytest.mark.parametrize("run", ["adaptive", NINE])
def test_charts_and_their_tables_follow_the_chosen_baseline(
    page: Page, run: str, request: pytest.FixtureRequest
) -> None:
    """The figures are those of `harness.statistics` for the pair of arms."""
    run_dir: Path = request.getfixturevalue(run)
    report = load(run_dir)
    page.open(run_dir / "report.html", height=900)
    page.evaluate("document.querySelector('#chart-speedup').scrollIntoView()")
    page.wait_for("document.querySelector('#chart-speedup[data-drawn]')")
    before = page.evaluate(NUMBERS), page.evaluate(DRAWN_RATIOS)
    drafting = [arm for arm in report.arms if arm.metrics.get("acceptance_rate") is not None]
    assert drafting and before[1][0][0] == pytest.approx(
        speedup.measured(report, drafting[0], report.below(drafting[0])).median, abs=1e-4
    )
    for other in report.arms[1:]:
        choose(page, other.index)
        page.wait_for(f"document.querySelector('#chart-speedup').data[1].x.length === {len(drafting)}")
        told = [speedup.measured(report, arm, None if arm is other else other) for arm in drafting]
        for drawn, found in zip(page.evaluate(DRAWN_RATIOS), told, strict=True):
            wanted = [found.median, found.low, found.high]
            assert drawn == [None if value is None else pytest.approx(value, rel=1e-9) for value in wanted]
        tables = page.evaluate(NUMBERS)
        headline = summary_of(replace(report.record, plan={**report.plan, "baseline": other.name}))["arms"]
        for row, arm, found in zip(tables[0], drafting, told, strict=True):
            speed = Ratio(**headline[arm.name]["ratios"]["output_tokens_per_s"])
            name = MISSING if arm is other else other.name
            assert row[-3:] == [shown(found), name, MISSING if arm is other else shown(speed)]
        for row, cells in zip(tables[1], decode_rows(report, other), strict=True):
            assert row[0] == cells[0] and row[-4:] == cells[1:]
        for row, cells in zip(tables[2], linear_rows(report, other), strict=True):
            assert row[:2] + row[-2:] == cells
    choose(page, 0)
    assert (page.evaluate(NUMBERS), page.evaluate(DRAWN_RATIOS)) == before and page.console == []


def shown(found: Ratio) -> str:
    return times(found.median, found.low, found.high)


def decode_rows(report: Report, other: Arm) -> list[list[str]]:
    """Arm, with whom it is compared, and how much longer each part of its decode steps takes."""
    rows, theirs = [], decode_step.means_by_trial(other)
    for arm in report.arms:
        ours, texts = decode_step.means_by_trial(arm), []
        for part in decode_step.PARTS:
            pairs = sorted(ours[part][t] - theirs[part][t] for t in ours[part].keys() & theirs[part].keys())
            half = len(pairs) // 2
            value = pairs[half] if len(pairs) % 2 else (pairs[half - 1] + pairs[half]) / 2 if pairs else None
            told = arm is not other and pairable(arm, other) and value is not None
            texts.append(f"{round(value, 2) + 0.0:+,.2f}" if told and value is not None else MISSING)
        rows.append([arm.name, MISSING if arm is other else other.name, *texts])
    return rows


def linear_rows(report: Report, other: Arm) -> list[list[str]]:
    """Arm, rows, with whom it is compared, and the ratio of its passes through the linear layers."""
    rows = []
    for arm in report.arms:
        for count in linear_layers.row_counts([arm]):
            ours, theirs = (linear_layers.stage_by_trial(each, count, "apply_s") for each in (arm, other))
            found = ratio_to(report, arm, other, ours, theirs)
            rows.append([arm.name, str(count), *([MISSING] * 2 if arm is other else [other.name, shown(found)])])
    return rows


@pytest.mark.slow
def test_filtered_arms_leave_tables_and_charts(page: Page, ladder: Path, tmp_path: Path) -> None:
    names = list(read_run(ladder).plan["arms"])
    page.open(ladder / "report.html", height=TALL_PX)
    page.wait_for(ALL_DRAWN)
    assert [page.evaluate(what) for what in (PANELS, CURVES, ARROWS)] == [6, 6, 4]
    toggle(page, names.index("static"))
    toggle(page, names.index("fp8"))
    page.wait_for(f"{CURVES} === 4")
    assert page.evaluate(VISIBLE) == ["continuous", "paged", "speculative", "int8"]
    assert page.evaluate(PANELS) == 4 and page.evaluate(ROWS) == ["continuous", "paged", "speculative", "int8"]
    assert page.evaluate(ARROWS) == 3  # none comes from static any more
    domains = (
        "['yaxis2','yaxis3','yaxis4','yaxis5'].map(a => document.querySelector('#chart-kv')._fullLayout[a].domain)"
    )
    ends = [end for low, high in page.evaluate(domains) for end in (high, low)]
    assert (
        ends == sorted(ends, reverse=True) and ends[0] > 0.9 and ends[-1] < 0.1
    )  # one above the other, and filling it
    assert page.evaluate("[...document.querySelectorAll('#steptime tbody tr')].filter(r => !r.hidden).length") == 4
    page.screenshot(tmp_path / "filtered.png")
    for arm in ("speculative", "paged", "int8"):
        toggle(page, names.index(arm))
    page.wait_for("document.querySelector('#speculation').hidden")  # nothing of it is left
    toggle(page, names.index("continuous"))  # the last one stays
    assert page.evaluate(VISIBLE) == ["continuous"]
    page.evaluate("document.querySelector('#compare button').click()")
    page.wait_for(f"{CURVES} === 6 && {PANELS} === 6 && !document.querySelector('#speculation').hidden")
    assert page.evaluate("location.hash") == "" and page.console == []


@pytest.mark.slow
def test_the_address_keeps_baseline_arms_and_theme(page: Page, ladder: Path) -> None:
    names = list(read_run(ladder).plan["arms"])
    page.open(ladder / "report.html", height=900)
    choose(page, names.index("paged"))
    toggle(page, names.index("static"))
    page.evaluate("document.getElementById('theme').click()")
    hash_ = page.evaluate("location.hash")
    assert hash_.startswith("#baseline=paged&arm=continuous&arm=paged&") and hash_.endswith("&theme=dark")
    shown = "[document.querySelector('#compare select').value, document.documentElement.dataset.theme]"
    before = page.evaluate(COMPARED)
    page.reload()
    page.wait_for(f"document.querySelector('#compare select') && {shown}[1] === 'dark'")
    assert page.evaluate(shown) == [str(names.index("paged")), "dark"]
    assert page.evaluate(COMPARED) == before and "static" not in page.evaluate(VISIBLE)
    page.evaluate("location.hash = '#baseline=nobody&arm=nobody&arm=int8'")  # what is unknown is passed over
    page.wait_for(f"{shown}[0] === '0'")
    assert page.evaluate(VISIBLE) == ["int8"]
    page.evaluate("location.hash = ''")
    page.wait_for("document.querySelectorAll('#compare input:checked').length === 6")
    assert page.evaluate(VISIBLE) == names and page.console == []
