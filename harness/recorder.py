"""Collects what a run emits, cheaply, and turns it into the record's tables when the run is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from harness.kv_holds import KVHolds
from harness.limits import StepCost
from harness.records import REQUEST_SCHEMA, STEP_SCHEMA, frame
from impls.request import Request
from impls.seams import DraftForward, Emission, StepResult, StepStats

# What a step keeps of its StepStats as it is: scalars only, so that a long run stays small.
_SCALARS = (
    *("start_s", "end_s", "schedule_s", "prepare_s", "forward_s", "sample_s", "propose_s", "commit_s", "attention_s"),
    *("prefill_tokens", "decode_tokens", "padding_tokens", "dead_rows", "draft_tokens", "accepted_tokens"),
    *("running", "waiting", "preempted", "kv_capacity_tokens", "kv_free_tokens", "kv_shared_tokens"),
    *("kv_allocation_unit", "num_logits_rows", "gathered_bytes"),
    *("swap_s", "swapped_out_bytes", "swapped_in_bytes", "swapped_out", "swap_kept_bytes", "copied_blocks"),
    *("worker", "prefill_only", "replayed"),
)
_scalars_of = attrgetter(*_SCALARS)
_emission_of = attrgetter("request_id", "token_ids", "time_s", "finish_reason")


@dataclass(slots=True)
class _Row:
    """One request. From ``draft_tokens`` on it is filled in when the tables are built."""

    index: int
    request: Request
    submitted_s: float
    scheduled_s: float | None = None
    first_step: int = -1
    preemptions: int = 0
    cached_prompt_tokens: int | None = None
    transfer: tuple[int, float] | tuple[None, None] = (None, None)
    finished_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    last_emission: int = -1
    draft_tokens: int = 0
    accepted_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def written_tokens(self) -> int:
        """K/V positions written by its end, prompt + output - 1: the last token is never an input.

        0 if it yielded nothing: there is no length to come, so what it holds beyond what it wrote is for nothing.
        """
        return len(self.request.prompt_token_ids) + len(self.token_ids) - 1 if self.token_ids else 0


class Recorder:
    """Fed by the driver, one call an event; `requests` and `steps` build the tables afterwards.

    While the run lasts it only extends flat lists at C speed; nothing is looked up per row. For the driver's thread
    only. ValueError, at the event or when the tables are built, for an id submitted twice, an id that was never
    submitted, and an emission after a request's end: each would make a figure wrong.
    """

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._unscheduled: set[str] = set()
        self._scalars: list[tuple[Any, ...]] = []
        self._slots: list[list[str | None]] = []
        # Flat over all steps, as `KVHolds` is; the `_num_` lists say how much of them each step has.
        self._num_live: list[int] = []
        self._num_drafting: list[int] = []
        self._num_lens: list[int] = []
        self._query_lens: list[int] = []
        self._kv_lens: list[int] = []
        self._draft_forwards: list[list[DraftForward]] = []
        self._kv_holds = KVHolds()
        self._drafts: list[tuple[str, tuple[int, int]]] = []
        # Flat over all emissions, with the step that each came with (-1: with no step of ours).
        self._emission_ids: list[str] = []
        self._emission_steps: list[int] = []
        self._emission_times: list[float] = []
        self._emission_tokens: list[tuple[int, ...]] = []

    # --- while the run lasts ------------------------------------------------------------------------------------------

    def submitted(self, request: Request, time_s: float) -> None:
        """The driver has handed it to the target. ValueError for an id that was there before."""
        if request.request_id in self._rows:
            raise ValueError(f"request {request.request_id!r} was submitted twice")
        self._rows[request.request_id] = _Row(len(self._rows), request, time_s)
        self._unscheduled.add(request.request_id)

    def aborted(self, request_id: str, time_s: float) -> None:
        """The driver gave up on it."""
        self._end(request_id, time_s, "aborted", None, len(self._emission_ids) - 1)

    def step(self, result: StepResult) -> None:
        """What one step of the target gave: its figures, if it is a step of ours, and the emissions."""
        stats = result.stats
        if stats is not None:
            self._add_step(stats)
        if result.emissions:
            self._add_emissions(result.emissions, -1 if stats is None else len(self._scalars) - 1)

    def _add_step(self, stats: StepStats) -> None:
        if self._unscheduled:
            for request_id in self._unscheduled.intersection(stats.scheduled):
                row = self._rows[request_id]
                row.scheduled_s, row.first_step = stats.start_s, len(self._scalars)
            self._unscheduled.difference_update(stats.scheduled)
        for request_id, cached in stats.cached_prompt_tokens.items():
            self._row(request_id).cached_prompt_tokens = cached
        for request_id, transfer in stats.transfers.items():
            self._row(request_id).transfer = transfer
        for request_id in stats.preempted_ids:
            self._row(request_id).preemptions += 1
        self._scalars.append(_scalars_of(stats))
        self._slots.append(list(stats.slot_request_ids))
        self._num_live.append(len(stats.scheduled))
        self._num_drafting.append(len(stats.drafted))
        self._num_lens.append(len(stats.query_lens))
        self._query_lens += stats.query_lens
        self._kv_lens += stats.kv_lens
        self._draft_forwards.append(stats.draft_forwards)
        self._kv_holds.add(stats.kv_reservations)
        if stats.drafted:
            self._drafts += stats.drafted.items()

    def _add_emissions(self, emissions: list[Emission], step: int) -> None:
        ids, tokens, times, reasons = zip(*map(_emission_of, emissions), strict=True)
        before = len(self._emission_ids)
        self._emission_ids += ids
        self._emission_steps += [step] * len(ids)
        self._emission_times += times
        self._emission_tokens += tokens
        if any(reasons):
            for nth, emission in enumerate(emissions, before):
                if emission.finish_reason is not None:
                    self._end(emission.request_id, emission.time_s, emission.finish_reason, emission.error, nth)

    def _end(self, request_id: str, time_s: float, reason: str, error: str | None, last_emission: int) -> None:
        row = self._row(request_id)
        if row.finish_reason is not None:
            raise ValueError(f"request {request_id!r} ended twice ({row.finish_reason}, then {reason})")
        row.finished_s, row.finish_reason, row.error, row.last_emission = time_s, reason, error, last_emission
        self._unscheduled.discard(request_id)

    def _row(self, request_id: str) -> _Row:
        row = self._rows.get(request_id)
        if row is None:
            raise ValueError(f"request {request_id!r} was never submitted")
        return row

    # --- when it is over ----------------------------------------------------------------------------------------------

    def sent(self) -> list[Request]:
        """As they were submitted, in that order: the rows of `requests`."""
        return [row.request for row in self._rows.values()]

    def requests(self) -> pd.DataFrame:
        """One row a request, in order of submission. One that never ended is recorded as aborted, without an end."""
        self._gather()
        rows = list(self._rows.values())
        columns: dict[str, list[Any]] = {
            "request_id": [r.request.request_id for r in rows],
            "session_id": [r.request.session_id for r in rows],
            "prompt_tokens": [len(r.request.prompt_token_ids) for r in rows],
            "planned_cached_tokens": [r.request.planned_cached_tokens for r in rows],
            "cached_prompt_tokens": [r.cached_prompt_tokens for r in rows],
            "max_tokens": [r.request.sampling.max_tokens for r in rows],
            "output_tokens": [len(r.token_ids) for r in rows],
            "intended_s": [r.request.arrival_s for r in rows],
            "submitted_s": [r.submitted_s for r in rows],
            "scheduled_s": [r.scheduled_s for r in rows],
            "first_token_s": [r.times[0] if r.times else None for r in rows],
            "finished_s": [r.finished_s for r in rows],
            "finish_reason": [r.finish_reason or "aborted" for r in rows],
            "error": [r.error for r in rows],
            "preemptions": [r.preemptions for r in rows],
            "draft_tokens": [r.draft_tokens for r in rows],
            "accepted_tokens": [r.accepted_tokens for r in rows],
            "output_token_ids": [r.token_ids for r in rows],
            "emission_times_s": [r.times for r in rows],
            "emission_tokens": [r.counts for r in rows],
            "kv_transfer_bytes": [r.transfer[0] for r in rows],
            "kv_transfer_s": [r.transfer[1] for r in rows],
            "priority": [r.request.priority for r in rows],
        }
        return frame(columns, REQUEST_SCHEMA)

    def steps(self, cost: Callable[[StepStats], StepCost] | None = None) -> pd.DataFrame:
        """One row a step. ``cost`` gives its FLOPs and bytes (null without); its StepStats has no ids and holds."""
        self._gather()
        columns: dict[str, Any] = {name: [row[i] for row in self._scalars] for i, name in enumerate(_SCALARS)}
        columns |= self._kv_holds.parts(
            columns,
            written=lambda request_id: self._row(request_id).written_tokens,
            prompt=lambda request_id: len(self._row(request_id).request.prompt_token_ids),
        )
        columns["step"] = range(len(self._scalars))
        columns["slot_request_ids"] = self._slots
        columns["kept_rows"], columns["emitted_tokens"] = self._kept()
        columns["drafting_sequences"] = self._num_drafting
        columns["replayed"] = [int(flag) for flag in columns["replayed"]]
        spans = [slice(a, b) for a, b in pairwise(np.cumsum([0, *self._num_lens]).tolist())]
        columns["query_rows"] = [sum(self._query_lens[span]) for span in spans]
        costs = [None if cost is None else cost(self._stats(step, span)) for step, span in enumerate(spans)]
        columns["flops"] = [None if c is None else float(c.flops) for c in costs]
        columns["bytes"] = [None if c is None else float(c.bytes) for c in costs]
        return frame(columns, STEP_SCHEMA)

    def _gather(self) -> None:
        """From the flat lists to each request's own. What arrives at one instant is one arrival."""
        for row in self._rows.values():
            row.token_ids, row.times, row.counts, row.draft_tokens, row.accepted_tokens = [], [], [], 0, 0
        emissions = zip(self._emission_ids, self._emission_times, self._emission_tokens, strict=True)
        for nth, (request_id, time_s, tokens) in enumerate(emissions):
            row = self._row(request_id)
            if row.finish_reason is not None and nth > row.last_emission:
                raise ValueError(f"request {request_id!r} emitted after its end ({row.finish_reason})")
            if not tokens:
                continue
            row.token_ids += tokens
            if row.times and row.times[-1] == time_s:
                row.counts[-1] += len(tokens)
            else:
                row.times.append(time_s)
                row.counts.append(len(tokens))
        for request_id, (drafted, accepted) in self._drafts:
            row = self._row(request_id)
            row.draft_tokens += drafted
            row.accepted_tokens += accepted

    def _kept(self) -> tuple[list[int], list[int]]:
        """Sequences that gained a kept token, and the tokens that they gained, by the step that made them.

        More emissions than live rows: a batch's tokens were held until its end (`emit=batch_end`). The engine makes one
        emission per sequence and step, and a static batch's sequence runs in every step from its first on, so its i-th
        emission belongs to step first + i.
        """
        emissions = [
            (request_id, step, len(tokens))
            for request_id, step, tokens in zip(
                self._emission_ids, self._emission_steps, self._emission_tokens, strict=True
            )
            if step >= 0 and tokens
        ]
        given = Counter(step for _, step, _ in emissions)
        rows, gained = [0] * len(self._scalars), [0] * len(self._scalars)
        made: Counter[str] = Counter()
        for request_id, step, num_tokens in emissions:
            if given[step] > self._num_live[step]:
                step = self._rows[request_id].first_step + made[request_id]
                made[request_id] += 1
            rows[step] += 1
            gained[step] += num_tokens
        return rows, gained

    def _stats(self, step: int, span: slice) -> StepStats:
        scalars = dict(zip(_SCALARS, self._scalars[step], strict=True))
        query_lens, kv_lens = self._query_lens[span], self._kv_lens[span]
        drafting = self._draft_forwards[step]
        return StepStats(**scalars, query_lens=query_lens, kv_lens=kv_lens, draft_forwards=drafting)
