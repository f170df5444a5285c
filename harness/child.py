"""The child process of one trial: reads its job from standard input, reports steps, finishes its record on SIGINT."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

REPORT_EVERY_S = 0.25  # often enough for a progress bar, rare enough to cost the measured thread nothing


def main(progress_fd: int) -> None:
    job: dict[str, Any] = json.loads(sys.stdin.read())
    os.set_inheritable(progress_fd, False)  # or a process that torch starts would keep the pipe open after us
    measuring = stop = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal stop
        if not measuring:  # nothing to finish yet: the parent records the trial as aborted
            raise KeyboardInterrupt
        stop = True

    signal.signal(signal.SIGINT, on_interrupt)
    from harness.trial import Progress, run_trial  # imports torch: seconds, in which SIGINT must already work

    last_report = 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal measuring, last_report
        measuring = progress.phase == "measuring"
        now = time.monotonic()
        if now - last_report >= REPORT_EVERY_S or progress.steps <= 1:
            last_report = now
            try:
                os.write(progress_fd, (json.dumps(vars(progress)) + "\n").encode())
            except BrokenPipeError:
                os._exit(1)  # the parent is gone: nobody would keep this trial apart from the next

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


if __name__ == "__main__":
    main(int(sys.argv[1]))
