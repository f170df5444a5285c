"""The worker's side: one engine in a process of its own, which takes orders between steps and reports every step."""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from impls.request import Request, Sequence
from impls.seams import BlockStorage, Clock, Emission, EngineBuilder, KVReservation, StepResult, StepStats
from impls.seams.topology import Config
from impls.topology.messages import Answer, Call, Drop, Failed, HandOver, Order, Resume, Stepped, Submit
from impls.topology.transfer import KVTransfer, TransferError


class FollowedClock:
    """Shows what the run's clock shows. It comes along with every order, for the run may have restarted it meanwhile;
    it has to count alike in every process of this machine, as a monotonic system clock does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def follow(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now()

    def sleep_until(self, deadline_s: float) -> None:
        self._clock.sleep_until(deadline_s)


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker is to be. ``transfer``: how it hands over, or takes, keys and values; None: it does neither.
    ``fingerprint``: of the weights that it has to find where it runs; None: it runs where its router does."""

    name: str
    config: Config
    builder: EngineBuilder
    clock: Clock
    transfer: KVTransfer | None
    fingerprint: str | None = None


def run_worker(plan: WorkerPlan, connection: Connection) -> None:
    """A worker process from its start to its end. It ends as soon as the router's end of the connection is closed,
    whatever it is doing then: a router that was killed leaves no worker behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; what it means is the router's affair
    orders: queue.SimpleQueue[tuple[Clock, Order]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, orders), daemon=True).start()
    if plan.config["device"].get("threads"):
        torch.set_num_threads(int(plan.config["device"]["threads"]))
    try:
        worker = Worker(plan)
        gc.collect()
        gc.freeze()
        gc.disable()  # as in the process that drives a single engine
        connection.send(Answer())
        while True:
            worker.turn(orders, connection)
    except BrokenPipeError:
        return  # the router has closed; `_receive` is about to end this process too
    except Exception as error:  # whatever a technique raises ends this worker; its requests fail with these words
        with suppress(OSError):  # a router of another host may be gone by now
            connection.send(Failed(" ".join(f"{type(error).__name__}: {error}".split())[:500]))
        raise


def _receive(connection: Connection, orders: queue.SimpleQueue[tuple[Clock, Order]]) -> None:
    """Keeps the pipe empty, so that the router never waits for a step to end."""
    try:
        while True:
            orders.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


class Worker:
    """An engine and what it has to do with other workers: hand over, or take."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.clock = FollowedClock(plan.clock)
        self._transfer = plan.transfer
        if plan.fingerprint is not None and (own := plan.builder.fingerprint(plan.config)) != plan.fingerprint:
            raise ValueError(f"the model's fingerprint is {own} there, {plan.fingerprint} here: other weights")
        memory = None if plan.transfer is None else plan.transfer.open(plan.name)
        self.engine = plan.builder.engine(plan.config, self.clock, memory)
        self._hands_over = memory is not None
        self._name = plan.name
        self._requests: dict[str, Request] = {}  # those that are to be handed over, whole
        self._ready: list[tuple[str, tuple[int, ...]]] = []  # held in this step: request, blocks
        self._transfers: dict[str, tuple[int, float]] = {}  # taken in this step: request -> bytes, seconds
        self._lost: dict[str, str] = {}  # not to be had in this step: request -> reason
        self._broken: dict[str, str] = {}  # nor ever: source -> reason
        self._can_run = False
        self._obeyed = 0
        if self._hands_over:
            self.engine.before_finish = self._hold

    def turn(self, orders: queue.SimpleQueue[tuple[Clock, Order]], connection: Connection) -> None:
        """Take every order that is there (wait for one if nothing can run), then one step."""
        try:
            clock, order = orders.get(block=not self._can_run, timeout=self._patience_s())
            while True:
                self.clock.follow(clock)
                if (answer := self._obey(order)) is not None:
                    connection.send(answer)
                clock, order = orders.get_nowait()
        except queue.Empty:
            pass
        report = self._step()
        self._can_run = report.result.stats is not None or bool(report.result.emissions)
        if self._can_run:
            connection.send(report)

    def _patience_s(self) -> float | None:
        """How long nothing can change without an order: None for ever, else until a waiting batch starts."""
        if self._can_run:
            return None
        now = self.clock.now()
        wake = self.engine.scheduler.next_event_s(now)
        return None if wake is None else max(0.0, wake - now)

    def _obey(self, order: Order) -> Answer | None:
        self._obeyed += not isinstance(order, Call)
        match order:
            case Call(number, function):
                return Answer(number, function(self.engine))
            case Drop(request_id):
                self._requests.pop(request_id, None)
                self.engine.abort(request_id)
                if self._hands_over:
                    self.engine.kv.let_go(request_id)
                elif self._transfer is not None:
                    # Its source has been told as well and may have written over the blocks while they were copied here.
                    self.engine.kv.reset_prefixes()
            case Submit(request) if self._hands_over and request.sampling.max_tokens > 1:
                self._requests[request.request_id] = request
                self.engine.add_request(replace(request, sampling=replace(request.sampling, max_tokens=1)))
            case Submit(request):
                self.engine.add_request(request)
            case Resume():
                self._resume(order)
        return None

    def _resume(self, order: Resume) -> None:
        prompt = order.request.prompt_token_ids
        sequence = Sequence(order.request, [*prompt, *order.token_ids], num_computed_tokens=len(prompt))
        request_id, transfer = order.request.request_id, self._transfer
        assert transfer is not None

        def fetch(storage: BlockStorage, blocks: Seq[int]) -> int:
            start = self.clock.now()
            try:
                size = transfer.fetch(order.source, order.blocks, storage, blocks)
            except TransferError as error:  # the step goes on: the rows of others are in it
                self._lost[request_id] = f"keys and values could not be had from worker {order.source}: {error}"
                self._broken[order.source] = str(error)
                return 0
            self._transfers[request_id] = (size, self.clock.now() - start)
            return 0  # nothing was swapped in: it came from a worker

        self.engine.resume(sequence, fetch)

    def _hold(self, sequence: Sequence) -> None:
        """A sequence has ended here and still holds its blocks. One that has more tokens to make keeps them."""
        if sequence.finish_reason == "length" and sequence.seq_id in self._requests:
            self._ready.append((sequence.seq_id, self.engine.kv.hold(sequence.seq_id, sequence.num_computed_tokens)))

    def _step(self) -> Stepped:
        result = self.engine.step(self.clock.now())
        ready, self._ready = dict(self._ready), []
        transfers, self._transfers = self._transfers, {}
        broken, self._broken = self._broken, {}
        handed = []
        emissions = self._fail_lost()
        lost = {emission.request_id for emission in emissions}
        for emission in result.emissions:
            if emission.request_id in lost:  # made of what its blocks held before
                continue
            if emission.request_id in ready:
                handed.append(HandOver(emission.request_id, emission.token_ids, ready[emission.request_id]))
                emission = replace(emission, finish_reason=None)
            if emission.finish_reason is not None or emission.request_id in ready:
                self._requests.pop(emission.request_id, None)
            emissions.append(emission)
        if result.stats is not None:
            self._complete(result.stats, transfers)
        return Stepped(StepResult(emissions, result.stats), self._obeyed, tuple(handed), tuple(transfers), broken)

    def _fail_lost(self) -> list[Emission]:
        """The ends of requests that were to go on with keys and values that did not come."""
        lost, self._lost = self._lost, {}
        for request_id in lost:
            self.engine.abort(request_id)
        if lost:
            self.engine.kv.reset_prefixes()  # their blocks may be known by the tokens that they do not hold
        now = self.clock.now()
        return [Emission(request_id, (), now, "error", reason) for request_id, reason in lost.items()]

    def _complete(self, stats: StepStats, transfers: dict[str, tuple[int, float]]) -> None:
        """What only this side knows of the step."""
        stats.worker = self._name
        stats.slot_request_ids = []  # every worker numbers its rows from 0: side by side they would be taken for one's
        stats.transfers = transfers
        if self._hands_over:
            stats.prefill_only = True
            kv = self.engine.kv
            running = {hold.request_id for hold in stats.kv_reservations}
            held = [
                KVReservation(seq_id, kv.reserved_tokens(seq_id), computed, False)
                for seq_id, computed in kv.held
                if seq_id not in running
            ]
            stats.kv_reservations += held
            stats.kv_free_tokens -= sum(hold.reserved for hold in held)
