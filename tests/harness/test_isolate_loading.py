"""A child that has no step to report: before and after its window it may be busy for long, but not idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from isolated_bodies import run_body

from harness.isolate import Ending, run_isolated

STALL_S = 1.0
BUSY = "end = time.monotonic() + 2.5\nwhile time.monotonic() < end: pass"
IN_A_HELPER = f"subprocess.run([sys.executable, '-c', {'import time' + chr(10) + BUSY!r}], check=True)"


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], Ending]:
    def run(body: str) -> Ending:
        job = {"out_dir": str(tmp_path / "out"), "body": body}
        return run_isolated(job, stall_s=STALL_S, on_progress=lambda report: None, target=run_body)

    return run


@pytest.mark.parametrize("work", [BUSY, IN_A_HELPER], ids=["itself", "in a helper"])
@pytest.mark.parametrize("phase", ["starting", "finishing"])
def test_what_is_busy_outside_of_its_window_is_no_hang(run: Callable[[str], Ending], phase: str, work: str) -> None:
    assert run(f"report(0, {phase!r})\n{work}") == Ending(None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("time.sleep(60)", "while starting, after 0 steps"),
        ("report(0, 'warming up'); time.sleep(60)", "while warming up, after 0 steps"),
        ("report(3)\nwhile True: pass", "while measuring, after 3 steps"),  # there a step is due, whatever it does
    ],
)
def test_one_that_sleeps_or_gives_no_step_in_its_window_is_killed(
    run: Callable[[str], Ending], body: str, said: str
) -> None:
    began = time.monotonic()
    ending = run(body)
    assert ending.error == f"hang: no step for {STALL_S:g} s (study.stall_s) {said}; killed"
    assert time.monotonic() - began < 15
