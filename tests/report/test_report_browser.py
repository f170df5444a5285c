"""The page in a real browser: everything is drawn, nothing is fetched, nothing is complained about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, find_browser, open_browser

from harness.records import decode_numbers, read_json

ALL_DRAWN = "document.querySelectorAll('.chart').length === document.querySelectorAll('.chart[data-drawn]').length"
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
    page.open(ladder / "report.html", dark=dark)
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
    page.open(hostile / "report.html")
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
