"""The report of a run that was measured: made by the command, read in a browser, and held against summary.json.

Its pictures, of both themes and of a filtered page, are left in build/screenshots/ for whoever wants to look.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Page
from open_report import COMPARED, CURVES, PAPERS, choose, open_whole, toggle

from harness.records import decode_numbers, read_json, read_run
from harness.report.parts import times
from harness.summary import summary_of

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "reference" / "cpu" / "ladder"
SCREENSHOTS = ROOT / "build" / "screenshots"
MOST_BYTES = 5_000_000
HEADLINE = "output_tokens_per_s"
VERDICTS = """[...document.querySelectorAll("table.verdict tbody tr")].map((row) => [
  row.querySelector(".name").textContent,
  ...[...row.cells].slice(1, 4).map((cell) => cell.innerText)])"""
SOURCED = """[...document.querySelectorAll("table.verdict [data-source]")].map((cell) =>
  [JSON.parse(cell.dataset.source), cell.dataset.value ?? null])"""
CHOSEN = "document.documentElement.dataset.theme"
ONE_GROUND = f"new Set([...{PAPERS}, getComputedStyle(document.body).backgroundColor]).size === 1"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed records alone; summary and report as `python -m harness.report` makes them."""
    copy = tmp_path_factory.mktemp("real") / "ladder"
    shutil.copytree(RECORDS, copy, ignore=shutil.ignore_patterns("summary.json", "report.html"))
    command = [sys.executable, "-m", "harness.report", str(copy)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(copy / "summary.json"), str(copy / "report.html")]
    return copy


@pytest.fixture(scope="module")
def arms(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = decode_numbers(read_json(run_dir / "summary.json"))["arms"]
    return found


def ratio_text(found: dict[str, Any]) -> str:
    return times(found["median"], found["low"], found["high"])


def test_it_is_small_and_draws_everything_from_itself_alone(page: Page, run_dir: Path) -> None:
    assert (run_dir / "report.html").stat().st_size <= MOST_BYTES
    open_whole(page, run_dir)
    assert page.evaluate("document.querySelectorAll('.chart').length") > 13
    for theme in ("light", "dark"):
        page.prefer(theme)
        page.wait_for(ONE_GROUND)
        keep(page, f"ladder-{theme}")
    assert page.console == []


def test_the_verdict_table_reads_as_the_summary(page: Page, run_dir: Path, arms: dict[str, Any]) -> None:
    page.open(run_dir / "report.html", height=900)
    read = {name: cells for name, *cells in page.evaluate(VERDICTS)}
    assert list(read) == list(arms)
    baseline = read_json(run_dir / "study.json")["baseline"]
    for name, (headline, *told) in read.items():
        entry = arms[name]
        assert headline.split()[0] == f"{entry['metrics'][HEADLINE]:,.1f}"
        compared = ((entry["ratios"], baseline), (entry["step_ratios"], entry["versus"]))
        for text, (ratios, reference) in zip(told, compared, strict=True):
            if reference in (None, name):
                assert text.strip() in ("", "baseline")
                continue
            found = ratios[HEADLINE]
            assert ratio_text(found) in text, name
            assert f"{found['verdict']} \u00b7 n {found['n']} \u00b7 vs {reference}" in text, name
    sourced = page.evaluate(SOURCED)
    assert len(sourced) > 8 * len(arms)
    for source, value in sourced:
        wanted: Any = arms
        for key in source:
            wanted = wanted[key]
        assert (None if value is None else float(value)) == wanted, source


def test_baseline_filter_and_theme_are_switched(page: Page, run_dir: Path) -> None:
    record = read_run(run_dir, tables=False)
    names = list(record.plan["arms"])
    open_whole(page, run_dir)
    curves = page.evaluate(CURVES)
    assert curves == len(names)
    choose(page, names.index("paged"))
    against = summary_of(replace(record, plan={**record.plan, "baseline": "paged"}))["arms"]
    for name, cell in zip(names, page.evaluate(COMPARED), strict=True):
        if name != "paged":
            found = against[name]["ratios"][HEADLINE]
            assert ratio_text(found) in cell["text"] and cell["verdict"] == found["verdict"], name
    toggle(page, names.index("static"))
    page.wait_for(f"{CURVES} === {curves - 1}")
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.evaluate("document.getElementById('theme').click()")
    page.wait_for(ONE_GROUND)
    assert page.evaluate(CHOSEN) == "dark" and page.evaluate(ground) != before
    keep(page, "ladder-filtered-dark")
    kept = page.evaluate("location.hash")
    assert kept.startswith("#baseline=paged&arm=continuous&") and kept.endswith("&theme=dark")
    assert page.console == [] and not [url for url in page.requests if url.startswith("http")]


def keep(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(SCREENSHOTS / f"{name}.png")
    assert (SCREENSHOTS / f"{name}.png").stat().st_size > 50_000
