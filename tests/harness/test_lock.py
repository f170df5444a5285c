"""Locks that processes share: who waits learns for whom, and every process of a machine comes to the same file."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import harness.lock
from harness.lock import held, shared_folder

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from harness.lock import held, shared_folder
with held(shared_folder() / sys.argv[1], sys.argv[2], print, shared=True):
    print("held", flush=True)
    time.sleep(60)
"""


class Busy(Exception):
    pass


def refuse(holder: str) -> None:
    raise Busy(holder)


def hold_elsewhere(name: str, holder: str, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, name, holder],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_holder_is_named_and_gone_with_its_process(own_locks: Path) -> None:
    process = hold_elsewhere("a.lock", "process 7, runs/äöü")
    try:
        for _ in range(2):  # who asks wipes nothing out
            with pytest.raises(Busy, match=r"^process 7, runs/äöü$"), held(own_locks / "a.lock", "me", refuse):
                pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with held(own_locks / "a.lock", "x", refuse):
        busy = pytest.raises(Busy, match=r"^x$")
        with busy, held(own_locks / "a.lock", "y", refuse):
            pass


def test_a_session_with_another_temporary_folder_finds_the_same_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine's own folder: for once without the tests' own."""
    monkeypatch.delenv("HARNESS_LOCKS")
    name = f"llm-serving-harness-test-{os.getpid()}.lock"
    path = shared_folder() / name
    process = hold_elsewhere(name, "another session", TMPDIR=str(tmp_path))
    try:
        with pytest.raises(Busy, match="another session"), held(path, "me", refuse, shared=True):
            pass
        assert stat.S_IMODE(path.stat().st_mode) == 0o666  # another user may wait for it
    finally:
        process.kill()
        process.communicate()
        path.unlink()


def test_only_a_folder_that_is_everybodys_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HARNESS_LOCKS")
    folders = [tmp_path / name for name in ("missing", "mine", "everybodys", "everybodys too")]
    for folder, mode in zip(folders[1:], (0o755, 0o1777, 0o1777), strict=True):
        folder.mkdir()
        folder.chmod(mode)
    monkeypatch.setattr(harness.lock, "SHARED", tuple(map(str, folders)))
    assert shared_folder() == folders[2]
    monkeypatch.setattr(harness.lock, "SHARED", tuple(map(str, folders[:2])))
    monkeypatch.setattr(harness.lock.tempfile, "tempdir", str(tmp_path / "own"))
    assert shared_folder() == tmp_path / "own"


def test_a_link_that_somebody_has_laid_there_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("chapter one")
    (tmp_path / "a.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), held(tmp_path / "a.lock", "me", refuse):
        pass
    assert (tmp_path / "precious").read_text() == "chapter one"
