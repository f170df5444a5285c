"""Workers of other hosts, started by their command, here or elsewhere."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from impls.topology.meeting import KEY

ROOT = Path(__file__).parents[2]
SECRET = "correct horse"
LIMIT_S = 90.0


@dataclass
class Joiner:
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    def waits_for(self, text: str, times: int = 1) -> None:
        began = time.monotonic()
        while self.said.count(text) < times:
            assert self.process.poll() is None, f"it has ended: {self.said}"
            assert time.monotonic() - began < LIMIT_S, f"it does not say {text!r}: {self.said}"
            time.sleep(0.02)

    def worker(self) -> psutil.Process:
        """The process that computes: a child of the fork server, which is one of the command's."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = [p for p in family if "forkserver" in str(p.cmdline()) and "forkserver" in str(p.parent().cmdline())]
        return found


@contextmanager
def joiner(folder: Path, address: str, name: str, *options: str, by: Sequence[str] = ()) -> Iterator[Joiner]:
    """``by``: the command that starts it elsewhere. It is gone at the end, with all that it started."""
    log = folder / f"{name}-{time.monotonic_ns()}.log"
    command = [*by, sys.executable, "-m", "impls.topology.join", address, "--name", name, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", KEY: SECRET}
    with log.open("w") as told:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=told)
    try:
        yield Joiner(process, log)
    finally:
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        process.kill()
        process.wait()


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
