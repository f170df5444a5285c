"""What a trial over worker processes suffers, by the name of its arm."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness.observe
from harness.child import measure

STEPS = 5


def stop_a_worker(job: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    """In arm `stuck` the decode worker stands still in the middle of the window, alive. The ids of the workers are
    written beside the run's folder."""
    if job["arm"] == "stuck":
        drive = harness.observe.drive

        def stopping(target: Any, *arguments: Any, on_step: Callable[[Any], None], **options: Any) -> bool:
            seen = 0

            def watch(result: Any) -> None:
                nonlocal seen
                seen += 1
                if seen == STEPS:
                    (Path(job["out_dir"]).parents[2] / "workers.json").write_text(json.dumps(target.pid_of))
                    os.kill(target.pid_of["decode0"], signal.SIGSTOP)
                on_step(result)

            return drive(target, *arguments, on_step=watch, **options)

        harness.observe.drive = stopping
    measure(job, send)
