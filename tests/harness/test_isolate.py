"""A trial's child process: what it reports, how it ends, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from isolated_bodies import run_body

from harness.fork_server import in_another_process
from harness.isolate import Ending, run_isolated


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Ending, list[Mapping[str, Any]]]]:
    def run(body: str, stall_s: float = 120.0) -> tuple[Ending, list[Mapping[str, Any]]]:
        reports: list[Mapping[str, Any]] = []
        job = {"out_dir": str(tmp_path / "out"), "body": body}
        return run_isolated(job, stall_s=stall_s, on_progress=reports.append, target=run_body), reports

    return run


def test_a_child_gets_its_job_reports_its_steps_and_ends(run: Any, tmp_path: Path) -> None:
    ending, reports = run("report(1); report(2); time.sleep(.5); open(job['out_dir'], 'w').write('done')")
    assert ending == Ending(None)
    assert [r["steps"] for r in reports] == [1, 2]
    assert (tmp_path / "out").read_text() == "done"


def test_a_child_has_a_process_group_of_its_own(run: Any, tmp_path: Path) -> None:
    run("open(job['out_dir'], 'w').write(str(os.getpgid(0)))")
    assert int((tmp_path / "out").read_text()) != os.getpgid(0)


def test_a_child_is_forked_after_the_imports_of_a_trial(run: Any, tmp_path: Path) -> None:
    run("open(job['out_dir'], 'w').write(str(all(m in sys.modules for m in ('torch', 'harness.trial'))))")
    assert (tmp_path / "out").read_text() == "True"


def test_a_question_is_answered_in_another_process() -> None:
    assert in_another_process(os.getpid) != os.getpid()


def test_a_temporary_folder_may_be_deeper_than_a_sockets_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    code = (
        "import os, tempfile\nfrom harness import fork_server\nfork_server.PRELOAD = []\n"  # torch would take seconds
        "print(fork_server.in_another_process(os.getpid) != os.getpid(), tempfile.gettempdir())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.returncode) == (f"True {folder}\n", 0), done.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('no such\\nlayer\\nin a list of hints')", "ValueError: no such layer in a list of hints"),
        ("import atexit; atexit.register(print, 'a last word'); raise ValueError('no such layer')", "no such layer"),
        ("raise MemoryError('Unable to allocate 9.3 GiB for an array')", "9.3 GiB for an array (the host has "),
        ("print('said on stdout', flush=True); sys.exit(3)", "said on stdout"),
        ("sys.exit(3)", "it printed nothing"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "lack of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
        ("os.kill(os.getpid(), 40)", "crashed with signal 40"),
    ],
)
def test_a_child_that_dies_says_why_in_one_line(run: Any, body: str, said: str) -> None:
    ending, _ = run(body)
    assert ending.error is not None and said in ending.error
    assert "\n" not in ending.error and not ending.interrupted


def test_no_step_for_stall_s_is_a_hang_and_its_helpers_die_too(run: Any, tmp_path: Path) -> None:
    began = time.monotonic()
    ending, _ = run(
        "helper = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "open(job['out_dir'], 'w').write(str(helper.pid)); report(3); time.sleep(60)",
        stall_s=2.0,
    )
    assert ending.error == "hang: no step for 2 s (study.stall_s) while measuring, after 3 steps; killed"
    assert time.monotonic() - began < 10
    assert _is_gone(int((tmp_path / "out").read_text()))


def test_reports_without_a_new_step_are_a_hang_as_well(run: Any) -> None:
    ending, reports = run("for _ in range(300): report(1); time.sleep(.1)", stall_s=2.0)
    assert ending.error is not None and "after 1 steps" in ending.error and len(reports) > 3


def test_there_is_no_time_limit_while_steps_advance(run: Any) -> None:
    ending, reports = run("for i in range(30): report(i); time.sleep(.1)", stall_s=2.0)
    assert ending.error is None and len(reports) == 30


def test_a_helper_that_keeps_the_pipe_open_does_not_delay_the_end(run: Any) -> None:
    began = time.monotonic()
    ending, _ = run("subprocess.Popen(['sleep', '60'], close_fds=False); report(1)")
    assert ending.error is None and time.monotonic() - began < 10


def test_ctrl_c_once_lets_the_child_finish_its_record(run: Any, tmp_path: Path) -> None:
    with _signals(after=[0.8]):
        ending, _ = run(
            "def stop(*_): open(job['out_dir'], 'w').write('aborted'); sys.exit(0)\n"
            "signal.signal(signal.SIGINT, stop)\nfor i in range(600): report(i); time.sleep(.1)"
        )
    assert ending == Ending(None, interrupted=True)
    assert (tmp_path / "out").read_text() == "aborted"


def test_sigterm_to_the_whole_group_lets_the_child_finish_its_record(tmp_path: Path) -> None:
    """What `timeout` and batch systems do: neither the server of all trials nor the trial itself may end by it."""
    body = (
        "def stop(*_): open(job['out_dir'], 'w').write('aborted'); sys.exit(0)\n"
        "signal.signal(signal.SIGINT, stop)\nfor i in range(600): report(i); time.sleep(.1)"
    )
    code = (
        "import os, signal\nfrom harness import fork_server, isolate\nfrom isolated_bodies import run_body\n"
        "fork_server.PRELOAD = []\n"  # torch would take seconds
        f"job = {{'out_dir': {str(tmp_path / 'out')!r}, 'body': {body!r}}}\n"
        "def told(report):\n    if report['steps'] == 3: os.killpg(0, signal.SIGTERM)\n"
        "print(isolate.run_isolated(job, stall_s=120.0, on_progress=told, target=run_body))"
    )
    folders = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)])
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": folders}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert (found.stdout, found.stderr) == ("Ending(error=None, interrupted=True)\n", "")
    assert (tmp_path / "out").read_text() == "aborted"


def test_a_child_hears_sigterm(run: Any) -> None:
    ending, _ = run("os.kill(os.getpid(), signal.SIGTERM); time.sleep(10)")
    assert ending == Ending("crashed with SIGTERM; last output: it printed nothing")
    assert in_another_process(_sigterm) is signal.SIG_DFL


def _sigterm() -> object:
    return signal.getsignal(signal.SIGTERM)


def test_ctrl_c_twice_kills_a_child_that_does_not_stop(run: Any) -> None:
    began = time.monotonic()
    with _signals(after=[0.5, 0.9]):
        ending, _ = run("signal.signal(signal.SIGINT, signal.SIG_IGN)\nfor i in range(600): report(i); time.sleep(.1)")
    assert ending.interrupted and ending.error is not None and "killed by the user" in ending.error
    assert time.monotonic() - began < 10


def test_the_previous_handler_is_restored(run: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    run("pass")
    assert signal.getsignal(signal.SIGINT) is before


class _signals:
    """Sends SIGINT to this process at the given times."""

    def __init__(self, after: list[float]) -> None:
        self._timers = [threading.Timer(t, os.kill, (os.getpid(), signal.SIGINT)) for t in after]

    def __enter__(self) -> None:
        for timer in self._timers:
            timer.start()

    def __exit__(self, *raised: object) -> None:
        for timer in self._timers:
            timer.cancel()


def _is_gone(pid: int) -> bool:
    for _ in range(50):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False
