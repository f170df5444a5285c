"""What the child process of one trial does: measure, report its steps, finish its record on SIGINT."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

REPORT_EVERY_S = 0.25  # often enough for a progress bar, rare enough to cost the measured thread nothing


def measure(job: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    """Run the job's trial and ``send`` its progress. Until the window opens SIGINT ends the process: there is nothing
    to finish, and whoever watches records the trial as aborted.
    """
    measuring = stop = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal stop
        if not measuring:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        stop = True

    signal.signal(signal.SIGINT, on_interrupt)
    from harness.trial import Progress, run_trial  # imports torch, unless the server has

    last_report = 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal measuring, last_report
        measuring = progress.phase in ("measuring", "finishing")
        now = time.monotonic()
        if now - last_report >= REPORT_EVERY_S or progress.steps <= 1:
            last_report = now
            send(vars(progress))

    run_trial(
        job["config"],
        study=job["study"],
        arm=job["arm"],
        trial=job["trial"],
        seed=job["seed"],
        out_dir=Path(job["out_dir"]),
        on_progress=on_progress,
        should_stop=lambda: stop,
    )
