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
    """A request that has not ended. ``worker`` makes its next token, as the order of this ``number`` of those to it
    says; ``source`` still holds its blocks for that one."""

    request: Request
    worker: str
    number: int
    source: str | None = None


class Router:
    """Every request that is submitted ends exactly once: in ``results``, or by `abort`.

    entries: workers that begin requests, taken in turn. decoders: workers that go on with what an entry hands over,
    the one with the fewest open requests first; none: the entries make all tokens. What workers are to be told piles up
    in ``orders`` (worker, order), what the caller is to be told in ``results``; both are taken out by who reads them.

    No keys and values pass any more where a decoder has said so (`Stepped.broken`): new requests begin at the entries
    that reach most decoders, and go on at one that theirs reaches. `cut_off` are the entries that reach none.

    An id may be used again as soon as its request has ended or was aborted: what a worker says of it without having
    obeyed the latest order is of the former one.

    Nobody waits in a circle. A decoder needs nothing of an entry but blocks that were written before they were
    announced, so it ends its requests whatever the entries do; an entry that waits for room waits for decoders only.
    """

    def __init__(self, entries: Seq[str], decoders: Seq[str] = ()) -> None:
        self.orders: list[tuple[str, Order]] = []
        self.results: deque[StepResult] = deque()
        self.deaths: dict[str, str] = {}
        self._entries, self._decoders = list(entries), list(decoders)
        self._hands_over = bool(decoders)
        self._broken: dict[tuple[str, str], str] = {}  # entry, decoder -> reason
        self._turn = 0
        self._ordered: Counter[str] = Counter()  # by worker: how many orders
        self._open: dict[str, _Open] = {}

    @property
    def has_open(self) -> bool:
        return bool(self._open)

    @property
    def cut_off(self) -> dict[str, str]:
        """Entries that reach none of the decoders that are left, and why: what they begin could not end."""
        found = {}
        for entry in self._entries:
            if self._decoders and not self._reached(entry):
                whys = [f"{d} gets nothing from it ({self._broken[entry, d]})" for d in self._decoders]
                found[entry] = f"was given up: {'; '.join(whys)}"
        return found

    def submit(self, request: Request, now_s: float) -> None:
        """ValueError for an id that is open already."""
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id!r} is already in the workers")
        reach = {entry: len(self._reached(entry)) for entry in self._entries}
        most = max(reach.values(), default=0)
        if not reach or (self._hands_over and not most):
            self._end_without_token(request.request_id, f"no worker is left for it: {self._why_none()}", now_s)
            return
        able = [entry for entry, count in reach.items() if count == most]
        worker = able[self._turn % len(able)]
        self._turn += 1
        self._open[request.request_id] = _Open(request, worker, self._order(worker, Submit(request)))

    def reject(self, request: Request, reason: str, now_s: float) -> None:
        """It can never run; no worker hears of it."""
        self.results.append(StepResult([Emission(request.request_id, (), now_s, "rejected", reason)]))

    def abort(self, request_id: str) -> None:
        """Nothing more is heard of it. An id that is not open is let be."""
        if (placed := self._open.pop(request_id, None)) is not None:
            self._drop(request_id, placed.worker, placed.source)

    def stepped(self, worker: str, report: Stepped, now_s: float) -> None:
        """What a worker's step brought: results, then who goes on with what it handed over."""
        self._broken |= {(source, worker): why for source, why in report.broken.items()}
        for request_id in report.taken:
            if (placed := self._told_of(request_id, worker, report)) is not None and placed.source is not None:
                self._drop(request_id, placed.source)
                placed.source = None
        emissions = [e for e in report.result.emissions if self._told_of(e.request_id, worker, report)]
        if emissions or report.result.stats is not None:
            self.results.append(StepResult(emissions, report.result.stats))
        for emission in emissions:
            if emission.finish_reason is not None:
                placed = self._open.pop(emission.request_id)
                self._drop(emission.request_id, placed.source)
        for handed in report.handed_over:
            if (placed := self._told_of(handed.request_id, worker, report)) is not None:
                self._pass_on(worker, placed, handed, now_s)

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

    def _pass_on(self, worker: str, placed: _Open, handed: HandOver, now_s: float) -> None:
        if not (decoders := self._reached(worker)):
            del self._open[handed.request_id]
            self._drop(handed.request_id, worker)
            self._end_without_token(handed.request_id, f"no worker is left for it: {self._why_none()}", now_s)
            return
        load = Counter(other.worker for other in self._open.values())
        placed.worker = min(decoders, key=lambda name: load[name])
        placed.source = worker
        order = Resume(placed.request, handed.token_ids, worker, handed.blocks)
        placed.number = self._order(placed.worker, order)

    def _reached(self, entry: str) -> list[str]:
        return [decoder for decoder in self._decoders if (entry, decoder) not in self._broken]

    def _told_of(self, request_id: str, worker: str, report: Stepped) -> _Open | None:
        """The request of which the report speaks; None for one that was aborted, as its workers have been told."""
        placed = self._open.get(request_id)
        is_it = placed is not None and placed.worker == worker and placed.number <= report.obeyed
        return placed if is_it else None

    def _drop(self, request_id: str, *workers: str | None) -> None:
        for worker in workers:
            if worker is not None and worker not in self.deaths:
                self._order(worker, Drop(request_id))

    def _order(self, worker: str, order: Order) -> int:
        """The number of this one, from 1."""
        self.orders.append((worker, order))
        self._ordered[worker] += 1
        return self._ordered[worker]

    def _end_without_token(self, request_id: str, reason: str, now_s: float) -> None:
        self.results.append(StepResult([Emission(request_id, (), now_s, "error", reason)]))

    def _why_none(self) -> str:
        return "; ".join(f"{worker} {reason}" for worker, reason in {**self.deaths, **self.cut_off}.items())
