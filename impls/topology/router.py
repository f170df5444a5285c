"""Which worker has which request, and who is to do what next: bookkeeping alone, testable without a process."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from impls.request import Request
from impls.seams import Emission, StepResult
from impls.topology.messages import Drop, HandOver, Order, Resume, Stepped, Submit


@dataclass
class _Open:
    """A request that has not ended. ``worker`` makes its next token; ``source`` still holds its blocks for that one."""

    request: Request
    worker: str
    source: str | None = None


class Router:
    """Every request that is submitted ends exactly once: in ``results``, or by `abort`.

    entries: workers that begin requests, taken in turn. decoders: workers that go on with what an entry hands over,
    the one with the fewest open requests first; none: the entries make all tokens. What workers are to be told piles up
    in ``orders`` (worker, order), what the caller is to be told in ``results``; both are taken out by who reads them.

    Nobody waits in a circle. A decoder needs nothing of an entry but blocks that were written before they were
    announced, so it ends its requests whatever the entries do; an entry that waits for room waits for decoders only.
    """

    def __init__(self, entries: Seq[str], decoders: Seq[str] = ()) -> None:
        self.orders: list[tuple[str, Order]] = []
        self.results: deque[StepResult] = deque()
        self.deaths: dict[str, str] = {}
        self._entries, self._decoders = list(entries), list(decoders)
        self._hands_over = bool(decoders)
        self._turn = 0
        self._open: dict[str, _Open] = {}

    @property
    def has_open(self) -> bool:
        return bool(self._open)

    def submit(self, request: Request, now_s: float) -> None:
        """ValueError for an id that is open already."""
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id!r} is already in the workers")
        if not self._entries or (self._hands_over and not self._decoders):
            self._end_without_token(request.request_id, f"no worker is left for it: {self._why_none()}", now_s)
            return
        worker = self._entries[self._turn % len(self._entries)]
        self._turn += 1
        self._open[request.request_id] = _Open(request, worker)
        self.orders.append((worker, Submit(request)))

    def reject(self, request: Request, reason: str, now_s: float) -> None:
        """It can never run; no worker hears of it."""
        self.results.append(StepResult([Emission(request.request_id, (), now_s, "rejected", reason)]))

    def abort(self, request_id: str) -> None:
        """Nothing more is heard of it. An id that is not open is let be."""
        if (placed := self._open.pop(request_id, None)) is not None:
            self._drop(request_id, placed.worker, placed.source)

    def stepped(self, worker: str, report: Stepped, now_s: float) -> None:
        """What a worker's step brought: results, then who goes on with what it handed over."""
        for request_id in report.taken:
            if (placed := self._open.get(request_id)) is not None and placed.source is not None:
                self._drop(request_id, placed.source)
                placed.source = None
        emissions = [e for e in report.result.emissions if self._is_at(e.request_id, worker)]
        if emissions or report.result.stats is not None:
            self.results.append(StepResult(emissions, report.result.stats))
        for emission in emissions:
            if emission.finish_reason is not None:
                placed = self._open.pop(emission.request_id)
                self._drop(emission.request_id, placed.source)
        for handed in report.handed_over:
            self._pass_on(worker, handed, now_s)

    def died(self, worker: str, reason: str, now_s: float) -> None:
        """Its requests fail. What it had handed over goes on, or fails where it was to: that is up to the transfer."""
        self.deaths[worker] = reason
        for group in (self._entries, self._decoders):
            if worker in group:
                group.remove(worker)
        self.orders = [(name, order) for name, order in self.orders if name != worker]
        for request_id, placed in list(self._open.items()):
            if placed.worker == worker:
                del self._open[request_id]
                self._drop(request_id, placed.source)
                self._end_without_token(request_id, f"worker {worker} {reason}", now_s)

    def _pass_on(self, worker: str, handed: HandOver, now_s: float) -> None:
        placed = self._open.get(handed.request_id)
        if placed is None or placed.worker != worker:  # aborted meanwhile: its entry has been told
            return
        if not self._decoders:
            del self._open[handed.request_id]
            self._drop(handed.request_id, worker)
            self._end_without_token(handed.request_id, f"no worker is left for it: {self._why_none()}", now_s)
            return
        load = Counter(other.worker for other in self._open.values())
        placed.worker = min(self._decoders, key=lambda name: load[name])
        placed.source = worker
        self.orders.append((placed.worker, Resume(placed.request, handed.token_ids, worker, handed.blocks)))

    def _is_at(self, request_id: str, worker: str) -> bool:
        placed = self._open.get(request_id)
        return placed is not None and placed.worker == worker

    def _drop(self, request_id: str, *workers: str | None) -> None:
        self.orders += [(w, Drop(request_id)) for w in workers if w is not None and w not in self.deaths]

    def _end_without_token(self, request_id: str, reason: str, now_s: float) -> None:
        self.results.append(StepResult([Emission(request_id, (), now_s, "error", reason)]))

    def _why_none(self) -> str:
        return "; ".join(f"{worker} {reason}" for worker, reason in self.deaths.items())
