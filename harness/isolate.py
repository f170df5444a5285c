"""Runs one trial in a child process of its own: a hang, a crash or a memory kill fails the trial, not the study."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from harness.errors import one_line

CHILD = (sys.executable, "-m", "harness.child")
ROOT = str(Path(__file__).resolve().parent.parent)  # the child imports what its parent did, from whatever folder
POLL_S = 0.2
GRACE_S = 30.0  # for an interrupted child to finish its record


@dataclass
class Ending:
    """How a child ended. ``error`` is one line, None if it ended by itself with status 0."""

    error: str | None
    interrupted: bool = False


def run_isolated(
    job: Mapping[str, Any],
    *,
    stall_s: float,
    on_progress: Callable[[Mapping[str, Any]], None],
    command: Sequence[str] = CHILD,
) -> Ending:
    """Start ``command`` with the job on its standard input and watch it until it ends.

    Ctrl-C (or SIGTERM) once asks the child to finish its record, twice kills it. ``stall_s`` seconds without a step
    kill it too. Nothing that the child started outlives it.
    """
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as output, _counted_interrupts() as interrupts:
        child = subprocess.Popen(
            [*command, str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))},
            start_new_session=True,
        )
        os.close(write_fd)
        try:
            _send(child, job)
            killed = _watch(child, read_fd, interrupts, stall_s, on_progress)
        finally:
            os.close(read_fd)
            _kill_group(child)
            code = child.wait()
        return Ending(killed or _describe(code, output), interrupted=bool(interrupts))


def run_inline(job: Mapping[str, Any], *, stall_s: float, on_progress: Callable[[Mapping[str, Any]], None]) -> Ending:
    """Run the trial in this process: nothing can end a hang but a second Ctrl-C, and memory is not its own."""
    from harness.trial import run_trial

    with _counted_interrupts(raise_second=True) as interrupts:
        try:
            run_trial(
                job["config"],
                **{key: job[key] for key in ("study", "arm", "trial", "seed")},
                out_dir=Path(job["out_dir"]),
                on_progress=lambda progress: on_progress(vars(progress)),
                should_stop=lambda: bool(interrupts),
            )
        except KeyboardInterrupt:
            return Ending("killed by the user before its record was finished", interrupted=True)
        except Exception as error:  # whatever a technique raises fails its trial, not the study
            return Ending(one_line(f"{type(error).__name__}: {error}")[:500], interrupted=bool(interrupts))
        return Ending(None, interrupted=bool(interrupts))


def _send(child: subprocess.Popen[bytes], job: Mapping[str, Any]) -> None:
    assert child.stdin is not None
    try:
        with child.stdin as stdin:
            stdin.write(json.dumps(job).encode())
    except BrokenPipeError:
        return  # it died at once; its exit status says why


def _watch(
    child: subprocess.Popen[bytes],
    read_fd: int,
    interrupts: list[int],
    stall_s: float,
    on_progress: Callable[[Mapping[str, Any]], None],
) -> str | None:
    """Follow the child's reports until it ends; why it was killed, or None if it was not."""
    rest, steps, advanced, asked, phase = b"", 0, time.monotonic(), 0.0, "starting"
    seen: tuple[object, ...] = ()
    is_open = True
    while child.poll() is None:
        if is_open and select.select([read_fd], [], [], POLL_S)[0]:
            data = os.read(read_fd, 65536)
            is_open = bool(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                report = json.loads(line)
                steps, phase = report["steps"], report["phase"]
                if (now_seen := (phase, steps, report.get("waits"))) != seen:
                    seen, advanced = now_seen, time.monotonic()
                on_progress(report)
        elif not is_open:
            time.sleep(POLL_S)
        now = time.monotonic()
        if interrupts and not asked:
            asked = now
            child.send_signal(signal.SIGINT)
        if len(interrupts) > 1 or (asked and now - asked > GRACE_S):
            return "killed by the user before its record was finished"
        if not asked and now - advanced > stall_s:
            return f"hang: no step for {stall_s:g} s (study.stall_s) while {phase}, after {steps} steps; killed"
    return None


def _describe(code: int, output: IO[bytes]) -> str | None:
    """The child's exit status in one line, with the last line that it printed."""
    if code == 0:
        return None
    if code == -signal.SIGINT:
        return "stopped by the user before anything was measured"
    output.seek(0)
    lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    last = one_line(lines[-1])[:500] if lines else "it printed nothing"
    if code == -signal.SIGKILL:
        return f"killed by the operating system (SIGKILL), most likely for lack of memory; last output: {last}"
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}; last output: {last}"
    return last


def _kill_group(child: subprocess.Popen[bytes]) -> None:
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
