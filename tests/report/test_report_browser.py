"""The page in a real browser: everything is drawn, nothing is fetched, nothing is complained about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Page, find_browser, open_browser
from simulated_run import HOSTILE, LADDER, write_run

from harness.records import decode_numbers, read_json, read_run
from harness.report import build
from harness.summary import summarize, summary_of

ALL_DRAWN = "document.querySelectorAll('.chart').length === document.querySelectorAll('.chart[data-drawn]').length"
TALL_PX = 9000  # higher than any page here: everything is near, so everything is drawn
READ_CELLS = "[...document.querySelectorAll('[data-source]')].map(c => [c.dataset.source, c.dataset.value ?? null])"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    program = find_browser()
    if program is None:
        pytest.skip("no browser: none of chromium, chromium-browser, google-chrome is installed")
    with open_browser(program) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True])
def test_a_ladder_is_drawn_from_itself_alone(page: Page, ladder: Path, tmp_path: Path, dark: bool) -> None:
    page.requests.clear()
    page.open(ladder / "report.html", height=TALL_PX, dark=dark)
    page.wait_for(f"document.querySelectorAll('.chart').length > 7 && {ALL_DRAWN}")
    assert page.evaluate("document.querySelectorAll('.chart .bars .point').length") > 500  # requests in slots
    assert page.evaluate("document.querySelectorAll('#chart-kv .scatterlayer .trace').length") > 12
    assert page.evaluate("document.documentElement.dataset.problem ?? null") is None
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.console == []
    page.screenshot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 50_000


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
    legend = page.evaluate("document.querySelector('#chart-ttft .legend').textContent")
    assert "</script><script>alert(1)" in legend
    assert page.console == [] and not [url for url in page.requests if url.endswith("/x")]


def test_without_decompression_the_page_says_so_and_keeps_its_tables(page: Page, ladder: Path, tmp_path: Path) -> None:
    old = (ladder / "report.html").read_text().replace("DecompressionStream", "NoSuchStream")
    (tmp_path / "old.html").write_text(old)
    page.open(tmp_path / "old.html")
    page.wait_for("!document.getElementById('problem').hidden")
    assert "Every number is in the table" in page.evaluate("document.getElementById('problem').textContent")
    assert page.evaluate("document.querySelectorAll('figure table').length") > 6


# --- compare mode -----------------------------------------------------------------------------------------------------

COMPARED = """[...document.querySelectorAll("table.verdict tbody tr")].map(r => r.cells[2])
  .map(c => c && ({...c.dataset, text: c.textContent}))"""
METRIC_ROWS = """[...document.querySelectorAll("#metrics tbody tr")].map(r => [...JSON.parse(r.cells[2].dataset.source),
  r.cells[3].dataset.value ?? null, r.cells[3].textContent, r.cells[4].textContent, r.cells[5].textContent])"""
PANELS = "document.querySelector('#chart-kv')._fullLayout.annotations.length"
CURVES = "document.querySelectorAll('#chart-ttft .scatterlayer .trace').length"
ARROWS = "document.querySelector('#chart-tradeoff')._fullLayout.annotations.length"
ROWS = "document.querySelector('#chart-steptime')._fullLayout.yaxis.ticktext"
VISIBLE = """[...document.querySelectorAll('table.verdict tbody tr')].filter(r => r.offsetHeight > 0)
  .map(r => r.querySelector('.name').textContent)"""


def choose(page: Page, baseline: int) -> None:
    page.evaluate(f"""(() => {{ const s = document.querySelector("#compare select"); s.value = "{baseline}";
      s.dispatchEvent(new Event("change", {{bubbles: true}})); }})()""")


def toggle(page: Page, arm: int) -> None:
    page.evaluate(f"document.querySelector('#compare input[value=\"{arm}\"]').click()")


@pytest.fixture(scope="module")
def nine_trials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough trials for intervals of order statistics."""
    run_dir = write_run(tmp_path_factory.mktemp("nine"), LADDER[:3], trials=9, num_requests=6)
    summarize(run_dir)
    build(run_dir)
    return run_dir


@pytest.mark.parametrize("run", ["ladder", pytest.param("nine_trials", marks=pytest.mark.slow)])
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
            assert (int(cell["n"]), cell["verdict"]) == (wanted["n"], wanted["verdict"])
            assert f"vs {baseline}" in cell["text"]
        for arm, _, metric, value, text, n, verdict in page.evaluate(METRIC_ROWS):
            found = arms[arm]["ratios"].get(metric)
            if found is None or arm == baseline:
                assert (value, text, n, verdict) == (None, "", "", "")
                continue
            assert int(n) == found["n"] and verdict.endswith(found["verdict"])
            assert (None if value is None else float(value)) == (
                None if found["median"] is None else pytest.approx(found["median"], rel=1e-12)
            )
            if found["low"] is not None:
                assert text == f"{found['median']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]"
    choose(page, 0)
    assert (page.evaluate(COMPARED), page.evaluate(METRIC_ROWS)) == before
    assert page.console == []


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
    page.evaluate("location.reload()")
    page.wait_for(f"document.readyState === 'complete' && {shown}[1] === 'dark'")
    assert page.evaluate(shown) == [str(names.index("paged")), "dark"]
    assert page.evaluate(COMPARED) == before and "static" not in page.evaluate(VISIBLE)
    page.evaluate("location.hash = '#baseline=nobody&arm=nobody&arm=int8'")  # what is unknown is passed over
    page.wait_for(f"{shown}[0] === '0'")
    assert page.evaluate(VISIBLE) == ["int8"]
    page.evaluate("location.hash = ''")
    page.wait_for("document.querySelectorAll('#compare input:checked').length === 6")
    assert page.evaluate(VISIBLE) == names and page.console == []


def test_a_hostile_baseline_is_shown_as_typed(page: Page, hostile: Path) -> None:
    page.open(hostile / "report.html", height=TALL_PX)
    page.wait_for(ALL_DRAWN)
    choose(page, 1)
    assert f"vs {HOSTILE}" in page.evaluate(COMPARED)[0]["text"]
    toggle(page, 0)
    page.wait_for(f"{CURVES} === 1")
    assert page.evaluate("document.querySelectorAll('img').length") == 0 and page.console == []
    legend = page.evaluate("document.querySelector('#chart-ttft .legend').textContent")
    assert "</script><script>alert(1)" in legend
