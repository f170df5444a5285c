"""What the child processes of test_reliability_trials.py suffer, by the name of their arm, before they measure."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

import harness.trial
from harness.child import measure
from harness.records import SCHEMA_VERSION, write_trial

SPARE_BYTES = 128 << 20
DISK_BYTES = 4096
JUMP_S = 1e8
Send = Callable[[Mapping[str, Any]], None]


def suffer(job: Mapping[str, Any], send: Send) -> None:
    {"memory": little_memory, "disk": little_disk, "clock": jumping_clock}.get(job["arm"], lambda: None)()
    measure(job, send)


def die_after_the_window(job: Mapping[str, Any], send: Send) -> None:
    """As when the quality's reference model is one too many for the machine's memory."""
    harness.trial.examine = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
    measure(job, send)


def little_memory() -> None:
    _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + SPARE_BYTES)


def little_disk() -> None:
    """No file may be longer: writing fails in the middle, as it does on a full disk."""
    _limit(resource.RLIMIT_FSIZE, DISK_BYTES)


def jumping_clock() -> None:
    """The wall clock is set back and forth by three years at every look."""
    real, jumps = time.time, itertools.cycle((JUMP_S, -JUMP_S))
    time.time = lambda: real() + next(jumps)


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def hang_in_static(job: Mapping[str, Any], send: Send) -> None:
    """Arm `static` hangs after three steps; any other is done at once."""
    if job["arm"] == "static":
        send({"phase": "measuring", "steps": 3, "output_tokens": 6, "finished": 0, "requests": 4})
        time.sleep(600)
    run = {key: job[key] for key in ("study", "arm", "trial", "seed", "config")} | {
        "schema_version": SCHEMA_VERSION, "status": "ok", "reasons": [], "axes": {}, "provenance": {}, "window": {},
        "metrics": {"output_tokens_per_s": 1.0}, "limits": {}, "validity": [], "clock": "real", "emulated": [],
    }  # fmt: skip
    write_trial(Path(job["out_dir"]), run)
