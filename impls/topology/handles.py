"""What the router knows of a worker besides its connection: a process of this host, or one of another."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from abc import ABC, abstractmethod
from multiprocessing.context import ForkServerContext, SpawnContext

from impls.seams import Clock
from impls.topology.worker import WorkerPlan, run_worker

ENDING_S = 5.0  # for a worker whose connection has been closed to be gone


def worker_context(clock: Clock) -> ForkServerContext | SpawnContext:
    """Workers are forked from a server that has imported what they need and computed nothing; where forking loaded
    libraries is unsafe, each starts from nothing."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["impls.build", type(clock).__module__])
    return context


class WorkerHandle(ABC):
    """A worker ends by itself when its connection is closed."""

    pid: int | None = None  # of this host

    @abstractmethod
    def kill(self) -> bool:
        """End it now, whatever it does. False if it was gone already, of which its connection is about to tell."""

    @abstractmethod
    def end(self, error: Exception | None) -> str:
        """Its connection is closed, with this ``error`` of reading from it: how it has ended."""

    def close(self) -> None:
        """Its connection is closed: see to it that it is gone."""


class LocalWorker(WorkerHandle):
    """A child of this process."""

    def __init__(self, plan: WorkerPlan, context: ForkServerContext | SpawnContext) -> None:
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=run_worker, args=(plan, theirs), name=plan.name, daemon=True)
        with theirs:
            self._process.start()
        self.pid = self._process.pid

    def kill(self) -> bool:
        was_alive = self._process.is_alive()
        self._process.kill()
        return was_alive

    def end(self, error: Exception | None) -> str:
        self._process.join(ENDING_S)
        return f"died ({exit_name(self._process.exitcode)})"

    def close(self) -> None:
        self._process.join(ENDING_S)
        self._process.kill()
        self._process.join()


class RemoteWorker(WorkerHandle):
    """A child of `impls.topology.join` on another host, where the end of its connection is the end of it."""

    def kill(self) -> bool:
        return True

    def end(self, error: Exception | None) -> str:
        why = "its connection was closed"
        if isinstance(error, OSError) and not isinstance(error, ConnectionResetError):
            why = str(error.strerror)  # of the host itself nothing is heard any more
        return f"was lost, on another host: {why}"


def exit_name(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
