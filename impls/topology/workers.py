"""The router's side of the worker processes: starts them, drives them as one target, and outlives any of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from impls.request import Request
from impls.seams import Clock, EngineBuilder, StepResult
from impls.seams.topology import Config, Topology
from impls.topology.clocks import ClockDifference, ShiftedClock, compare
from impls.topology.handles import LocalWorker, RemoteWorker, WorkerHandle, worker_context
from impls.topology.meeting import await_workers, limit_sending
from impls.topology.messages import Answer, Call, Failed, Order, Stepped
from impls.topology.router import Router
from impls.topology.transfer import KVTransfer
from impls.topology.worker import WorkerPlan

TAKING_S = 30  # for a worker whose connection is full to take something out


class WorkerGroup(Topology):
    """Workers with these configs (by name), and the router that speaks for them.

    ``entries`` begin requests, ``decoders`` go on with them (`Router`), by ``transfer`` of keys and values. Nothing
    else passes between workers: all orders and reports come by here, while `step` or `call` runs. ``remote``: those
    that are not started here, but dial in at ``listen`` from other hosts (`impls.topology.join`), before the others
    begin; then their clocks are compared with this one.
    RuntimeError if a worker does not come or cannot be built, in the words of what it raised.
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
        remote: Seq[str] = (),
        listen: str | None = None,
    ) -> None:
        self.clock = clock
        self.router = Router(entries, decoders)
        self._names = list(configs)
        self._has_decoders = bool(decoders)
        self._calls = 0
        self._answers: dict[str, Any] = {}  # to the last call
        self._connections: dict[str, Connection] = {}
        self._handles: dict[str, WorkerHandle] = {}
        self._clocks: dict[str, ClockDifference] = {}  # of other hosts
        self._transfer = transfer  # as long as they live
        context = worker_context(clock)
        try:
            if remote:
                begun = time.monotonic()
                self._connections |= await_workers(str(listen), remote)
                self.waited_s = time.monotonic() - begun
            for name, config in configs.items():
                plan = WorkerPlan(name, config, builder, clock, transfer)
                if name in remote:
                    self._handles[name] = RemoteWorker()
                    with suppress(OSError):  # it is gone, which is about to be read
                        self._connections[name].send(replace(plan, fingerprint=builder.fingerprint(config)))
                else:
                    self._handles[name] = local = LocalWorker(plan, context)
                    self._connections[name] = local.connection
                limit_sending(self._connections[name], TAKING_S)
            self._collect(self._names)
            for name in remote:
                self._clocks[name] = compare(clock, partial(self._told_by, name))
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
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
        self._transfer = None

    # --- beside requests ----------------------------------------------------------------------------------------------

    def call(self, function: Callable[[Any], Any], *, first_only: bool = False) -> list[Any]:
        return self._call(self._names[:1] if first_only else self._names, function)

    def _call(self, names: Seq[str], function: Callable[[Any], Any]) -> list[Any]:
        self._calls += 1
        self._answers.clear()
        for name in names:
            self._send(name, Call(self._calls, function))
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
        """Of this host's workers that are alive, as far as is known."""
        known = {name: self._handles[name].pid for name in self._connections}
        return {name: pid for name, pid in known.items() if pid is not None}

    @property
    def remote(self) -> Seq[str]:
        return tuple(self._clocks)

    def clock_errors(self) -> Mapping[str, float]:
        """No two clocks run equally fast: those of the living are compared again."""
        errors = {name: known.error_s for name, known in self._clocks.items()}
        for name in errors.keys() - self.deaths.keys():
            with suppress(RuntimeError):  # it has just died
                now = compare(self.clock, partial(self._told_by, name))
                errors[name] = max(errors[name], abs(now.shift_s) + now.error_s)
        return errors

    def _told_by(self, name: str) -> float:
        (shown,) = self._call([name], _shown_by)
        return float(shown)

    # --- the connections ----------------------------------------------------------------------------------------------

    def _collect(self, names: Seq[str]) -> list[Any]:
        while not all(name in self._answers for name in names):
            for name in names:
                if name in self.deaths:
                    raise RuntimeError(f"worker {name} {self.deaths[name]}")
            self._listen(None)
        return [self._answers[name] for name in names]

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
        except (EOFError, OSError) as error:
            self._lost(name, None, error)
            return
        match report:
            case Stepped():
                self.router.stepped(name, report, self.clock.now())
            case Answer(number, value):
                if number == self._calls:  # else a call has failed, by the death of another, before this one answered
                    self._answers[name] = value
            case Failed(reason):
                self._lost(name, f"failed: {reason}")

    def _give_up(self, name: str, reason: str) -> None:
        """End a worker that can be of no use any more."""
        was_alive = self._handles[name].kill()  # else its end is about to be heard, and says more
        self._lost(name, reason if was_alive else None)

    def _lost(self, name: str, reason: str | None, error: Exception | None = None) -> None:
        self._connections.pop(name).close()
        end = self._handles[name].end(error)
        self.router.died(name, reason or end, self.clock.now())

    def _send_orders(self) -> None:
        """Until nothing follows from what was sent: who takes nothing is lost, and whom that cuts off is of no use."""
        while True:
            for name, reason in self.router.cut_off.items():
                self._give_up(name, reason)
            if not self.router.orders:
                return
            orders, self.router.orders = self.router.orders, []
            for name, order in orders:
                self._send(name, order)

    def _send(self, name: str, order: Order) -> None:
        if (connection := self._connections.get(name)) is None:
            return
        try:
            connection.send((self._clock_of(name), order))
        except (BrokenPipeError, ConnectionResetError):
            return  # it has just died, which `_listen` is about to read: what it was to do fails with it
        except BlockingIOError:
            self._give_up(name, f"was given up: it took no orders for {TAKING_S} s")
        except OSError as error:  # another host that is not reached any more, and will not be read from either
            self._lost(name, None, error)

    def _clock_of(self, name: str) -> Clock:
        known = self._clocks.get(name)
        return self.clock if known is None else ShiftedClock(self.clock, known.shift_s)


def _shown_by(engine: Any) -> float:
    return float(engine.clock.now())
