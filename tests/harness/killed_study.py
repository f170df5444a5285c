"""A whole study in a process that kills itself, with -9, at one of its writes to the run folder."""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from direct_study import launcher

import harness.trial
from harness.__main__ import finish_study, main
from harness.fork_server import import_ahead

WAIT_S = 120.0


class Writes:
    """Counts the moments at which a killed process leaves something behind: before a folder or a name changes, and with
    a file half-written. At the ``at``-th of them the process dies.
    """

    def __init__(self, run_dir: Path, at: int | None) -> None:
        self.count, self._run_dir, self._at = 0, str(run_dir), at
        for module, name in ((os, "mkdir"), (os, "rename"), (os, "replace"), (os, "unlink"), (shutil, "rmtree")):
            setattr(module, name, self._before(getattr(module, name)))
        self._open, io.open = io.open, self._opened  # type: ignore[assignment]  # what pathlib calls
        self._write_table, pq.write_table = pq.write_table, self._wrote_table

    def _pass(self, path: Any) -> None:
        if str(path).startswith(self._run_dir):
            self.count += 1
            if self.count == self._at:
                os.kill(os.getpid(), signal.SIGKILL)

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            self._pass(path)
            return function(path, *arguments, **options)

        return call

    def _opened(self, path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = self._open(path, mode, *arguments, **options)
        if "w" in mode:
            self._pass(path)
        return file

    def _wrote_table(self, table: Any, path: Any, **options: Any) -> None:
        self._write_table(table, path, **options)
        whole = Path(path).stat().st_size
        os.truncate(path, whole // 2)
        self._pass(path)
        self._write_table(table, path, **options)


def run_study(folder: Path, options: list[str], at: int | None, with_report: bool) -> None:
    """In ``folder``/run. Its output is in ``folder``/output, the number of its writes in ``folder``/writes."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ["HARNESS_LOCKS"] = str(folder)
    torch.set_num_threads(1)
    harness.trial.host_load = lambda: {"load_1m": 0.0, "cpu_percent": 0.0}  # it looks for 0.2 s, twice a trial
    writes = Writes(folder / "run", at)
    command = [*options, "isolation=inline", f"run_dir={folder / 'run'}"]
    finish = finish_study if with_report else lambda run_dir, plan: []
    status = main(command, launch=launcher(), finish=finish)
    (folder / "writes").write_text(str(writes.count))
    sys.exit(status)


def start_study(
    folder: Path, options: list[str], *, at: int | None = None, with_report: bool = False
) -> BaseProcess:
    """In a process of its own, forked with all imports done, as a trial's is."""
    import_ahead()
    process = multiprocessing.get_context("forkserver").Process(
        target=run_study, args=(folder, options, at, with_report)
    )
    process.start()
    return process


def end_of(process: BaseProcess) -> int | None:
    """Its exit status, negative for a signal; None if it has not ended in time."""
    process.join(WAIT_S)
    status = process.exitcode
    process.kill()
    return status
