"""The router's side of the worker processes: starts them, drives them as one target, and outlives any of them."""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from impls.request import Request
from impls.seams import Clock, EngineBuilder, StepResult
from impls.seams.topology import Config, Topology
from impls.topology.messages import Answer, Call, Failed, Order, Stepped
from impls.topology.router import Router
from impls.topology.transfer import KVTransfer
from impls.topology.worker import WorkerPlan, run_worker

ENDING_S = 5.0  # for a worker whose connection has been closed to be gone


def _context(clock: Clock) -> ForkServerContext | SpawnContext:
    """Workers are forked from a server that has imported what they need and computed nothing; where forking loaded
    libraries is unsafe, each starts from nothing."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["impls.build", type(clock).__module__])
    return context


class WorkerGroup(Topology):
    """Workers with these configs (by name), and the router that speaks for them.

    ``entries`` begin requests, ``decoders`` go on with them (`Router`), by ``transfer`` of keys and values. Nothing
    else passes between workers: all orders and reports come by here, while `step` or `call` runs.
    RuntimeError if a worker cannot be built, in the words of what it raised.
    """

    def __init__(
        self,
        configs: Mapping[str, Config],
        *,
        entries: Seq[str],
        decoders: Seq[str] = (),
        transfer: KVTransfer | None = None,
        builder: EngineBuilder,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self.router = Router(entries, decoders)
        self._names = list(configs)
        self._has_decoders = bool(decoders)
        self._answers: dict[str, Answer] = {}
        self._connections: dict[str, Connection] = {}
        self._processes: dict[str, BaseProcess] = {}
        self._transfer = transfer  # as long as they live
        context = _context(clock)
        try:
            for name, config in configs.items():
                ours, theirs = context.Pipe()
                plan = WorkerPlan(name, config, builder, clock, transfer)
                process = context.Process(target=run_worker, args=(plan, theirs), name=name, daemon=True)
                self._processes[name], self._connections[name] = process, ours
                with theirs:
                    process.start()
            self._collect(self._names)
        except BaseException:
            self.close()
            raise

    # --- a target -----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if (reason := self.never_runs(request)) is not None:
            self.router.reject(request, reason, self.clock.now())
        else:
            self.router.submit(request, self.clock.now())
            self._send_orders()

    def never_runs(self, request: Request) -> str | None:
        """Why the workers that come after its first could not run it. Its first worker judges for itself."""
        return None

    def step(self, until: float) -> StepResult:
        if not self.has_work:
            self.clock.sleep_until(until)
        while self.has_work and not self.router.results:
            left = None if math.isinf(until) else max(0.0, until - self.clock.now())
            if not self._listen(left):
                break
        return self.router.results.popleft() if self.router.results else StepResult()

    @property
    def has_work(self) -> bool:
        return self.router.has_open or bool(self.router.results)

    def abort(self, request_id: str) -> None:
        self.router.abort(request_id)
        self._send_orders()

    def close(self) -> None:
        """End every worker, whatever it is doing. Nothing may be asked afterwards."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        for process in self._processes.values():
            if process.pid is not None:
                process.join(ENDING_S)
                process.kill()
                process.join()
        self._processes.clear()
        self._transfer = None

    # --- beside requests ----------------------------------------------------------------------------------------------

    def call(self, function: Callable[[Any], Any], *, first_only: bool = False) -> list[Any]:
        names = self._names[:1] if first_only else self._names
        for name in names:
            self._send(name, Call(function))
        return self._collect(names)

    @property
    def alike(self) -> bool:
        return not self._has_decoders

    @property
    def deaths(self) -> Mapping[str, str]:
        return self.router.deaths

    @property
    def pids(self) -> list[int]:
        return [*self.pid_of.values()]

    @property
    def pid_of(self) -> dict[str, int]:
        """Of the workers that are alive, as far as is known."""
        return {name: self._processes[name].pid or 0 for name in self._connections}

    # --- the connections ----------------------------------------------------------------------------------------------

    def _collect(self, names: Seq[str]) -> list[Any]:
        while not all(name in self._answers for name in names):
            for name in names:
                if name in self.deaths:
                    raise RuntimeError(f"worker {name} {self.deaths[name]}")
            self._listen(None)
        return [self._answers.pop(name).value for name in names]

    def _listen(self, timeout_s: float | None) -> bool:
        """Wait for reports and pass on what follows from them; False if there was none in time."""
        names = {connection: name for name, connection in self._connections.items()}
        heard = wait(list(names), timeout_s)
        for connection in heard:
            assert isinstance(connection, Connection)
            self._hear(names[connection], connection)
        self._send_orders()
        return bool(heard)

    def _hear(self, name: str, connection: Connection) -> None:
        try:
            report = connection.recv()
        except (EOFError, OSError):
            self._lost(name, None)
            return
        match report:
            case Stepped():
                self.router.stepped(name, report, self.clock.now())
            case Answer():
                self._answers[name] = report
            case Failed(reason):
                self._lost(name, f"failed: {reason}")

    def _lost(self, name: str, reason: str | None) -> None:
        self._connections.pop(name).close()
        process = self._processes[name]
        process.join(ENDING_S)
        self.router.died(name, reason or f"died ({_exit_name(process.exitcode)})", self.clock.now())

    def _send_orders(self) -> None:
        orders, self.router.orders = self.router.orders, []
        for name, order in orders:
            self._send(name, order)

    def _send(self, name: str, order: Order) -> None:
        if (connection := self._connections.get(name)) is None:
            return
        try:
            connection.send((self.clock, order))
        except (BrokenPipeError, ConnectionResetError):
            return  # it has just died, which `_listen` is about to read: what it was to do fails with it


def _exit_name(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
