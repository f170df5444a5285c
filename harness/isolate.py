"""Runs one trial in a child process of its own: a hang, a crash or a memory kill fails the trial, not the study."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar

from harness.child import measure
from harness.errors import LONGEST, failure
from harness.texts import one_line

ROOT = str(Path(__file__).resolve().parent.parent)
POLL_S = 0.2
ASK_EVERY_S = 1.0
GRACE_S = 30.0  # for an interrupted child to finish its record
OUTPUT_BYTES = 1 << 16  # the end of a child's output, of which the last line is told
# Every trial is forked from one server that has imported torch and neither computed nor opened a GPU context: a trial
# is a new process without the seconds of its imports. Where forking loaded libraries is unsafe, it starts from nothing.
HAS_SERVER = sys.platform == "linux"
PRELOAD = ["harness.trial"]
LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # bytes: a socket's path is bounded, and its folder so

T = TypeVar("T")
Job = Mapping[str, Any]
Send = Callable[[Mapping[str, Any]], None]


@dataclass
class Ending:
    """How a child ended. ``error`` is one line, None if it ended by itself with status 0."""

    error: str | None
    interrupted: bool = False


def import_ahead() -> None:
    """Start the imports of the first trial now, beside whatever else is to be done before it. Returns at once.

    The server is deaf to Ctrl-C from its first moment on: who started it has to answer that.
    """
    if not HAS_SERVER:
        return
    _make_socket_folder()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    own = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, own]))  # the server is to find us from any folder
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        forkserver.ensure_running()
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if own is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = own


def _make_socket_folder() -> None:
    """Where the server's socket will lie: multiprocessing's own choice, unless TMPDIR is too long for a socket."""
    own = tempfile.gettempdir()
    if len(os.fsencode(own)) <= LONGEST_FOLDER:
        return
    tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()  # made once, and remembered by this process and its children
    finally:
        tempfile.tempdir = own


def _context() -> ForkServerContext | SpawnContext:
    return multiprocessing.get_context("forkserver") if HAS_SERVER else multiprocessing.get_context("spawn")


def in_another_process(function: Callable[[], T]) -> T:
    """What ``function`` returns or raises, in a process that ends with it."""
    import_ahead()
    with ProcessPoolExecutor(1, mp_context=_context()) as pool:
        return pool.submit(function).result()


def run_isolated(
    job: Job, *, stall_s: float, on_progress: Send, target: Callable[[Job, Send], None] = measure
) -> Ending:
    """Run ``target`` on the job in a process of its own and watch it until it ends.

    Ctrl-C (or SIGTERM) once asks the child to finish its record, twice kills it. ``stall_s`` seconds without a step
    kill it too. Nothing that the child started outlives it.
    """
    import_ahead()
    context = _context()
    reports, write_end = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile() as output, reports, _counted_interrupts() as interrupts:
        child = context.Process(target=_enter, args=(target, job, write_end, output.name))
        with write_end:
            try:
                child.start()
            except (EOFError, OSError) as error:
                why = f"its process could not be started: {one_line(str(error)) or type(error).__name__}"
                return Ending(why, interrupted=bool(interrupts))
        try:
            killed = _watch(child, reports, interrupts, stall_s, on_progress)
        finally:
            _kill_group(child)
            child.join()
        return Ending(killed or _describe(child.exitcode, output), interrupted=bool(interrupts))


def _enter(target: Callable[[Job, Send], None], job: Job, write_end: Connection, output: str) -> None:
    """The child's side: a process group of its own, its output in a file, its reports on the pipe."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.set_inheritable(write_end.fileno(), False)  # or a process that torch starts would keep the pipe open after us

    def send(report: Mapping[str, Any]) -> None:
        try:
            write_end.send_bytes(json.dumps(report).encode())
        except BrokenPipeError:
            os._exit(1)  # the parent is gone

    try:
        target(job, send)
    except Exception as error:  # told by itself: the last line of the output may be its last line only, or another's
        send({"error": failure(error)})
        raise


def _end_with_parent() -> None:
    """A study that is killed takes its trial along: left alone, it would run beside the trial that a resumed study
    starts in its place, and write its record there. A thread, for a trial may report nothing for minutes.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def run_inline(job: Job, *, stall_s: float, on_progress: Send) -> Ending:
    """Run the trial in this process: nothing can end a hang but a second Ctrl-C, and memory is not its own."""
    from harness.trial import run_trial

    with _counted_interrupts(raise_second=True) as interrupts:
        try:
            run_trial(
                job["config"],
                **{key: job[key] for key in ("study", "arm", "trial", "seed")},
                out_dir=Path(job["out_dir"]),
                isolated=False,
                on_progress=lambda progress: on_progress(vars(progress)),
                should_stop=lambda: bool(interrupts),
            )
        except KeyboardInterrupt:
            return Ending("killed by the user before its record was finished", interrupted=True)
        except Exception as error:  # whatever a technique raises fails its trial, not the study
            return Ending(failure(error), interrupted=bool(interrupts))
        return Ending(None, interrupted=bool(interrupts))


def _watch(
    child: BaseProcess, reports: Connection, interrupts: list[int], stall_s: float, on_progress: Send
) -> str | None:
    """Follow the child's reports until it ends; why it failed or was killed, or None if nothing says so."""
    steps, advanced, asked, told, phase = 0, time.monotonic(), 0.0, 0.0, "starting"
    seen: tuple[object, ...] = ()
    is_open = True
    while True:
        has_ended = child.exitcode is not None  # asked before the pipe: what it sent last is read all the same
        if is_open and reports.poll(0.0 if has_ended else POLL_S):
            try:
                report = json.loads(reports.recv_bytes())
            except EOFError:
                is_open = False
                continue
            if "error" in report:
                return str(report["error"])
            steps, phase = report["steps"], report["phase"]
            if (now_seen := (phase, steps, report.get("waits"))) != seen:
                seen, advanced = now_seen, time.monotonic()
            on_progress(report)
        elif has_ended:
            return None
        elif not is_open:
            child.join(POLL_S)
        if has_ended:
            continue
        now = time.monotonic()
        if interrupts and now - told > ASK_EVERY_S:  # more than once: a process that has just been forked is deaf
            asked, told = asked or now, now
            _signal(child, signal.SIGINT)
        if len(interrupts) > 1 or (asked and now - asked > GRACE_S):
            return "killed by the user before its record was finished"
        if not asked and now - advanced > stall_s:
            return f"hang: no step for {stall_s:g} s (study.stall_s) while {phase}, after {steps} steps; killed"


def _signal(child: BaseProcess, number: int) -> None:
    assert child.pid is not None
    try:
        os.kill(child.pid, number)
    except ProcessLookupError:
        return  # it ended by itself in this moment


def _describe(code: int | None, output: IO[bytes]) -> str | None:
    """The child's exit status in one line, with the last line that it printed."""
    if code == 0:
        return None
    if code == -signal.SIGINT:
        return "stopped by the user before anything was measured"
    assert code is not None
    output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
    lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    last = one_line(lines[-1])[:LONGEST] if lines else "it printed nothing"
    if code == -signal.SIGKILL:
        return f"killed by the operating system (SIGKILL), most likely for lack of memory; last output: {last}"
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}; last output: {last}"
    return last


def _kill_group(child: BaseProcess) -> None:
    assert child.pid is not None
    child.kill()  # it may not have got as far as a group of its own
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # all of them have ended


@contextmanager
def _counted_interrupts(raise_second: bool = False) -> Iterator[list[int]]:
    """SIGINT and SIGTERM are collected instead of raised, so that none can strike between two lines of bookkeeping."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # a launcher's thread: signals reach the main thread, which ends it
        return

    def collect(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if raise_second and len(received) > 1:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, collect) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
