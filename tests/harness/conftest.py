"""What the tests of this room share: locks of their own, so that they wait for nobody who measures on this machine, and
trials in their process that do not look for 0.2 s, twice, at what the host is doing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_study import run_command


@pytest.fixture(autouse=True, scope="session")
def own_locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("locks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARNESS_LOCKS", str(folder))
        yield folder


@pytest.fixture(autouse=True, scope="module")
def idle_host() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.trial.host_load", lambda: {"load_1m": 0.0, "cpu_percent": 0.0})
        yield


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command line in an empty folder with a fake runner."""
    monkeypatch.chdir(tmp_path)
    return run_command
