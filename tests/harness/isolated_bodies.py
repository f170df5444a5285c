"""What the child processes of test_isolate.py run: the lines of Python in their job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def run_body(job: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    def report(steps: int, phase: str = "measuring") -> None:
        send({"phase": phase, "steps": steps, "output_tokens": 2 * steps, "finished": 0, "requests": 4})

    modules = {"os": os, "signal": signal, "subprocess": subprocess, "sys": sys, "time": time}
    exec(job["body"], {**modules, "job": job, "report": report})
