"""The page in a real browser: everything is drawn, nothing is fetched, nothing is complained about."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from browser import Page
from open_report import ALL_DRAWN, COMPARED, CURVES, PAPERS, TALL_PX, choose, open_whole, toggle
from simulated_run import HOSTILE, LADDER, ArmPlan, run_record, write_many, write_measured, write_plan, write_run

from harness.records import decode_numbers, read_json, write_trial
from harness.report import build

FIRST_CHART_S, MOST_LOADS = 2.0, 5
CORES_OF_ITS_OWN = 1.0  # with less the browser is not on the machine of two cores for which the page is judged
READ_CELLS = "[...document.querySelectorAll('[data-source]')].map(c => [c.dataset.source, c.dataset.value ?? null])"


def test_a_ladder_is_drawn_from_itself_alone_in_both_themes(page: Page, ladder: Path, tmp_path: Path) -> None:
    open_whole(page, ladder)
    assert page.evaluate("document.querySelectorAll('.chart').length") > 13
    assert page.evaluate("document.querySelectorAll('.chart .bars .point').length") > 500  # requests in slots
    assert page.evaluate("document.querySelectorAll('#chart-kv .scatterlayer .trace').length") > 12
    for theme in ("light", "dark"):
        page.prefer(theme)
        page.wait_for(f"new Set([...{PAPERS}, getComputedStyle(document.body).backgroundColor]).size === 1")
        assert page.evaluate("document.querySelectorAll('.chart .main-svg').length") > 13 and page.console == []
        page.screenshot(tmp_path / f"{theme}.png")
        assert (tmp_path / f"{theme}.png").stat().st_size > 50_000
    assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()


def test_the_table_and_the_first_chart_are_there_within_two_seconds(
    page: Page, ladder: Path, record_property: Callable[[str, object], None]
) -> None:
    """Wall time, by the page's own clock, from the start of its loading: what its reader waits.

    The best of a few loads counts, since what else runs on the machine can only lengthen one. Nothing but a load of two
    seconds or less passes. If there is none, and others have left the browser less than one core in every load, then
    the page was not judged: the test skips and says what it saw. A slow page on a machine that is not full fails.
    """
    seconds: list[float] = []
    free: list[float] = []
    while not seconds or (min(seconds) > FIRST_CHART_S and len(seconds) < MOST_LOADS):
        began_s, others = time.monotonic(), busy_seconds() - page.cpu_seconds()
        page.open(ladder / "report.html", height=900)
        page.wait_for("performance.getEntriesByName('first chart').length")
        others = busy_seconds() - page.cpu_seconds() - others
        free.append(psutil.cpu_count() - others / (time.monotonic() - began_s))
        seconds.append(page.evaluate("performance.getEntriesByName('first chart')[0].startTime / 1000"))
        assert page.evaluate("document.querySelector('table.verdict tbody').offsetHeight") > 100
        assert page.evaluate("document.querySelectorAll('#chart-slots .bars .point').length") > 100
    record_property("first_chart_s", seconds)
    record_property("cores_left_by_others", free)
    seen = f"loads of {rounded(seconds)} s, with {rounded(free)} cores left by others"
    if min(seconds) > FIRST_CHART_S and max(free) < CORES_OF_ITS_OWN:
        pytest.skip(f"the machine is full: {seen}")
    assert min(seconds) <= FIRST_CHART_S, seen


def rounded(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def busy_seconds() -> float:
    """CPU time of all processes of the machine so far, and what a hypervisor gave to others."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


@pytest.mark.parametrize("num_arms", [0, 1])
def test_few_arms_are_drawn(page: Page, num_arms: int, tmp_path: Path) -> None:
    build(write_run(tmp_path, LADDER[:num_arms], trials=1, num_requests=5))
    open_whole(page, tmp_path)
    assert page.evaluate("document.querySelectorAll('.chart').length > 8") == (num_arms == 1)
    assert page.evaluate("document.querySelectorAll('table.verdict tbody tr').length") == num_arms


def test_failures_missing_and_endless_values_and_gpus_are_drawn(page: Page, tmp_path: Path) -> None:
    """An arm with two GPUs, beside arms that failed, did not run or were halted, and two with inf, null and NaN."""
    plans = [ArmPlan(name) for name in ("gpus", "failed", "not run", "halted", "endless", "nan")]
    write_plan(tmp_path, plans, 1, 5)
    write_measured(tmp_path, "ladder", plans[0], 0, 5, gpus=2)
    for plan, status in ((plans[1], "failed"), (plans[2], "not_run")):
        reasons = [f"{plan.name}, and why"]
        write_trial(tmp_path / plan.name / "0", run_record("ladder", plan, 0, 5, status=status, reasons=reasons))
    write_measured(tmp_path, "ladder", plans[3], 0, 5, status="aborted", reasons=["stopped by the user"])
    latencies = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), math.inf)
    write_measured(
        tmp_path, "ladder", plans[4], 0, 5, {"ttft_s": {**latencies, "n": 5}, "itl_s": {"p50": None, "n": 0}}
    )
    write_measured(tmp_path, "ladder", plans[5], 0, 5, {"output_tokens_per_s": math.nan, "weights_bytes": math.nan})
    build(tmp_path)
    open_whole(page, tmp_path)
    axes = (
        "Object.keys(document.querySelector('#chart-telemetry')._fullLayout).filter(k => k.startsWith('yaxis')).length"
    )
    # Three of the steps, three of process and host; utilisation, PCIe both ways, power and clocks; what a GPU refused
    # has none.
    assert page.evaluate(axes) == 11
    assert [page.evaluate(COMPARED)[i] is None for i in range(6)] == [False, True, True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(("arms", "trials"), [(8, 25), (200, 1)], ids=["25 trials", "200 arms"])
def test_200_runs_are_drawn(page: Page, arms: int, trials: int, tmp_path: Path) -> None:
    build(write_many(tmp_path, arms, trials, num_requests=6))
    open_whole(page, tmp_path, printed=True)
    choose(page, 1)
    toggle(page, 0)
    page.wait_for(f"{CURVES} === {arms - 1}")
    assert page.console == []


def test_numbers_in_the_browser_are_the_summarys(page: Page, ladder: Path) -> None:
    page.open(ladder / "report.html")
    page.wait_for("document.querySelectorAll('[data-source]').length > 300")
    summary = decode_numbers(read_json(ladder / "summary.json"))["arms"]
    for source, value in page.evaluate(READ_CELLS):
        found: Any = summary
        for key in json.loads(source):
            found = found[key]
        assert (None if value is None else float(value)) == found, source


def test_the_button_changes_the_theme_of_page_and_charts(page: Page, ladder: Path) -> None:
    page.open(ladder / "report.html", height=900)
    page.wait_for("document.querySelector('#chart-slots[data-drawn]')")
    assert not page.evaluate(ALL_DRAWN)  # what is far below waits until it comes near
    background = "getComputedStyle(document.body).backgroundColor"
    plot = "document.querySelector('#chart-slots')._fullLayout.paper_bgcolor"
    before = (page.evaluate(background), page.evaluate(plot))
    page.evaluate("document.getElementById('theme').click()")
    page.wait_for(f"{plot} !== {json.dumps(before[1])}")
    assert page.evaluate(background) != before[0]
    page.evaluate("document.getElementById('theme').click()")
    page.wait_for(f"{plot} === {json.dumps(before[1])}")
    assert page.console == []


def test_hostile_names_run_nothing_and_are_shown_as_typed(page: Page, hostile: Path) -> None:
    page.open(hostile / "report.html", height=TALL_PX)
    page.wait_for(f"document.querySelectorAll('.chart').length > 7 && {ALL_DRAWN}")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("document.querySelectorAll('.chart a').length") == 0
    legend = "document.querySelector('#chart-ttft .legend').textContent"
    assert "</script><script>alert(1)" in page.evaluate(legend)
    choose(page, 1)
    assert f"vs {HOSTILE}" in page.evaluate(COMPARED)[0]["text"]
    toggle(page, 0)
    page.wait_for(f"{CURVES} === 1")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert "</script><script>alert(1)" in page.evaluate(legend)
    assert page.console == [] and not [url for url in page.requests if url.endswith("/x")]


def test_without_decompression_the_page_says_so_and_keeps_its_tables(page: Page, ladder: Path, tmp_path: Path) -> None:
    old = (ladder / "report.html").read_text().replace("DecompressionStream", "NoSuchStream")
    (tmp_path / "old.html").write_text(old)
    page.open(tmp_path / "old.html")
    page.wait_for("!document.getElementById('problem').hidden")
    assert "Every number is in the table" in page.evaluate("document.getElementById('problem').textContent")
    assert page.evaluate("document.querySelectorAll('figure table').length") > 6
