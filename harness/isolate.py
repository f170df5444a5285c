"""Runs one trial in a child process of its own: a hang, a crash or a memory kill fails the trial, not the study."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from harness.child import measure
from harness.errors import LONGEST, failure
from harness.fork_server import STOPS, import_ahead, process_context
from harness.texts import one_line

POLL_S = 0.2
ASK_EVERY_S = 1.0
GRACE_S = 30.0  # for an interrupted child to finish its record
# Outside of its window a child may be busy for longer than `stall_s` without a step (it reads and packs large weights,
# compiles, quantises). Looked at so often in that time; a thread that only polls uses less than this share of a core.
LOOKS = 10
BUSY_SHARE = 0.02
OUTPUT_BYTES = 1 << 16  # the end of a child's output, of which the last line is told

Job = Mapping[str, Any]
Send = Callable[[Mapping[str, Any]], None]


@dataclass
class Ending:
    """How a child ended. ``error`` is one line, None if it ended by itself with status 0."""

    error: str | None
    interrupted: bool = False


def run_isolated(
    job: Job, *, stall_s: float, on_progress: Send, target: Callable[[Job, Send], None] = measure
) -> Ending:
    """Run ``target`` on the job in a process of its own and watch it until it ends.

    Ctrl-C (or SIGTERM) once asks the child to finish its record, twice kills it. ``stall_s`` seconds without a step
    kill it too; outside of its window only if it, and whatever it has started, does not compute either. Nothing that
    the child started outlives it.
    """
    import_ahead()
    context = process_context()
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
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
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
    looked, used_s = advanced, 0.0
    is_open = True
    while True:
        has_ended = child.exitcode is not None  # asked before the pipe: what it sent last is read all the same
        if is_open and reports.poll(0.0 if has_ended else POLL_S):
            try:
                report = json.loads(reports.recv_bytes())
            except (EOFError, OSError):  # it ended, perhaps in the middle of a report
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
        if phase != "measuring" and now - looked > stall_s / LOOKS:
            before_s, used_s = used_s, _cpu_seconds(child)
            if used_s - before_s > BUSY_SHARE * (now - looked):
                advanced = now
            looked = now
        if not asked and now - advanced > stall_s:
            return f"hang: no step for {stall_s:g} s (study.stall_s) while {phase}, after {steps} steps; killed"


def _cpu_seconds(child: BaseProcess) -> float:
    """What the child and all that it has started have used, the ended ones that were waited for included."""
    used_s = 0.0
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(child.pid)
        for process in [whole, *whole.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used_s += times.user + times.system + times.children_user + times.children_system
    return used_s


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
        known = -code in signal.Signals.__members__.values()  # most real-time signals have no name
        return f"crashed with {signal.Signals(-code).name if known else f'signal {-code}'}; last output: {last}"
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

    previous = {number: signal.signal(number, collect) for number in STOPS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
