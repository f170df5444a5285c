"""Runs that several of the report's tests read; they are made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, find_browser, open_browser
from simulated_run import HOSTILE, ArmPlan, run_record, write_measured, write_plan, write_run

from harness.records import write_trial
from harness.report import build
from harness.summary import summarize


@pytest.fixture(scope="session")
def page() -> Iterator[Page]:
    """One browser for all tests that want one."""
    program = find_browser()
    if program is None:
        pytest.skip("no browser: none of chromium, chromium-browser, google-chrome is installed")
    with open_browser(program) as opened:
        yield opened


@pytest.fixture(scope="session")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole ladder with its summary and report."""
    run_dir = write_run(tmp_path_factory.mktemp("ladder"))
    summarize(run_dir)
    build(run_dir)
    return run_dir


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names and texts that would be HTML, script, a template or a Plotly tag if anything let them."""
    run_dir = tmp_path_factory.mktemp("hostile")
    plans = (ArmPlan("static", "static", "contiguous", 4), ArmPlan(HOSTILE, versus="static", drafts=2))
    write_plan(run_dir, plans, 1, 6, study=HOSTILE)
    write_measured(run_dir, HOSTILE, plans[0], 0, 6)
    write_measured(run_dir, HOSTILE, plans[1], 0, 6, validity=[f"{HOSTILE}: {HOSTILE}"], reasons=[HOSTILE])
    failed = run_record(HOSTILE, plans[1], 1, 6, status="failed", reasons=[HOSTILE], emulated=[HOSTILE])
    write_trial(run_dir / "hostile" / "1", failed)
    summarize(run_dir)
    build(run_dir)
    return run_dir
