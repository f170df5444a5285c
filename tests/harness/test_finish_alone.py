"""The end of a study computes as well: it waits until nobody measures on its devices, and nobody measures beside it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import harness.__main__
import harness.equivalence
import harness.records
import harness.report
import harness.summary
from harness.__main__ import finish_study
from harness.block import device_locks

PLAN = {"baseline": "a", "arms": {"a": {"versus": None, "config": {"device": {"name": "cpu"}}}}}


class Busy(Exception):
    pass


def refuse(said: str) -> None:
    raise Busy(said)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, own_locks: Path) -> list[str]:
    """Who else asked for the device while the study was finished, by what was going on."""
    found: list[str] = []

    def ask(what: str) -> None:
        with pytest.raises(Busy, match="measured on cpu"), device_locks(["cpu"], Path("another/run"), refuse):
            pass
        found.append(what)

    def summarize(run_dir: Path, study: Any) -> dict[str, Any]:
        return {"baseline": "a", "arms": {}}

    monkeypatch.setattr(harness.__main__, "planned_configs", lambda plan: {})
    monkeypatch.setattr(harness.equivalence, "check_study", lambda *given: ask("tokens are compared"))
    monkeypatch.setattr(harness.records, "read_run", lambda run_dir: None)
    monkeypatch.setattr(harness.summary, "summarize", summarize)
    monkeypatch.setattr(harness.report, "build", lambda *given: ask("the report is made"))
    return found


def test_nobody_measures_while_a_study_is_finished(asked: list[str]) -> None:
    for _ in range(2):  # and afterwards the device is free again
        assert finish_study(Path("run"), PLAN)[0] == Path("run/summary.json")
    assert asked == ["tokens are compared", "the report is made"] * 2


def test_it_waits_for_who_measures_and_ctrl_c_ends_that(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def complain(text: str) -> None:
        said.append(text)
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # once it sleeps in the kernel

    monkeypatch.setattr(harness.__main__, "complain", complain)
    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        with device_locks(["cpu"], Path("another/run"), refuse), pytest.raises(KeyboardInterrupt):
            finish_study(Path("run"), PLAN)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert asked == [] and len(said) == 1
    assert said[0].startswith("waiting: another trial is being measured on cpu") and "another/run" in said[0]
