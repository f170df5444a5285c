"""What every policy shares: the queues, the rows, the limits, rejection, growth and preemption."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any

from impls.request import Sequence
from impls.seams import Arm, KVCacheManager, ScheduledStep, Scheduler, never_runs


class QueueScheduler(Scheduler):
    """Queues in order of arrival; every operation is O(1), a step O(sequences that run in it).

    Contract with the engine. `schedule` allocates cache for every position that it schedules. It may shorten or drop a
    sequence's ``draft_token_ids`` (the first ones stay), so the engine reads them after it. For each scheduled sequence
    that is no dead row the engine then raises ``num_computed_tokens`` by what was scheduled, less the rejected drafts,
    appends at least one token, and calls ``kv.commit``; when a sequence ends, it sets ``finish_reason`` and calls
    `finish` after the commit. A part of a prompt, which does not reach the sequence's end, raises the counter and
    is committed, no more. `schedule` itself resets and counts what it preempts (``preemptions``); tokens
    that were emitted stay in ``token_ids`` and are computed again with the prompt, but must not be emitted again. A
    dead row recomputes position ``num_computed_tokens - 1`` and none of its counters move. A sequence that misses
    nothing waits for its last token, which the step in flight yields: it does not run, and frees its blocks soon.
    Between steps the engine may allocate further positions for a proposer; they are the sequence's until it ends.

    Raises ValueError for limits that `limit_reasons` refuses and for an id that is already here, KeyError for an
    unknown one.
    """

    emit = "step"  # when tokens are shown; `static` can hold them back until its batch ends
    order = "fcfs"  # who joins first
    whole_prompts = True  # a prompt is computed in one step

    def __init__(
        self, *, kv: KVCacheManager, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int | None = None
    ) -> None:
        reasons = self.limit_reasons(max_num_seqs, max_num_batched_tokens, max_model_len)
        if reasons:
            raise ValueError("; ".join(reasons))
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens or max(2048, max_model_len)
        self._kv, self._max_model_len = kv, max_model_len
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: dict[str, Sequence] = {}
        self._rejected: dict[str, str] = {}
        self._slots: list[str | None] = [None] * max_num_seqs
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))  # a heap: the lowest free row is taken first

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        config = arm.axes["batching"]
        return cls.limit_reasons(config.get("max_num_seqs"), config.get("max_num_batched_tokens"), arm.max_model_len)

    @classmethod
    def limit_reasons(cls, max_num_seqs: Any, max_num_batched_tokens: Any, max_model_len: int) -> list[str]:
        """Why these limits cannot work: every running sequence needs a row, and most policies never split a prompt."""
        if not _is_count(max_num_seqs):
            return [f"batching.max_num_seqs={max_num_seqs}: must be an integer of at least 1"]
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(2048, max_model_len)
        elif not _is_count(max_num_batched_tokens):
            return [f"batching.max_num_batched_tokens={max_num_batched_tokens}: must be null or an integer >= 1"]
        reasons = []
        if cls.whole_prompts and max_num_batched_tokens < max_model_len:
            reasons.append(
                f"batching.max_num_batched_tokens={max_num_batched_tokens}: must be at least max_model_len "
                f"({max_model_len}), a prompt being computed in one step"
            )
        if max_num_batched_tokens < max_num_seqs:
            reasons.append(
                f"batching.max_num_seqs={max_num_seqs}: must be at most max_num_batched_tokens "
                f"({max_num_batched_tokens}), every running sequence needing a row"
            )
        return reasons

    def add(self, sequence: Sequence, now_s: float) -> None:
        """A sequence that can never run is kept apart until the next `schedule` names it in ``rejected``."""
        seq_id = sequence.seq_id
        if seq_id in self._waiting or seq_id in self._rows or seq_id in self._rejected:
            raise ValueError(f"{seq_id} is already scheduled")
        sequence.num_reserved_tokens = 0
        reason = never_runs(sequence.request, self._max_model_len, self._kv)
        if reason is None:
            self._waiting[seq_id] = sequence
        else:
            self._rejected[seq_id] = reason

    def next_event_s(self, now_s: float) -> float | None:
        return None

    @property
    def running(self) -> Seq[Sequence]:
        return list(self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._rejected)

    @property
    def slots(self) -> Seq[str | None]:
        return self._slots

    # --- for the policies ---------------------------------------------------------------------------------------------

    def _take_rejected(self) -> dict[str, str]:
        rejected, self._rejected = self._rejected, {}
        return rejected

    def _grow_running(self, step: ScheduledStep) -> list[Sequence]:
        """Schedule what every live sequence misses, oldest first; who of them has drafts, which are not granted yet.

        Where the cache is full, `_victim` yields: the youngest, unless a policy says otherwise; but as long as anybody
        is about to end, who finds no room sits this step out. A sequence is asked to grow only where it outgrows what
        it holds, one step in ``block_size``.
        """
        scheduled = step.num_scheduled_tokens
        short: list[Sequence] = []
        drafting: list[Sequence] = []
        ending = False
        for seq_id, sequence in self._running.items():
            num_tokens = len(sequence.token_ids)
            if num_tokens == sequence.num_computed_tokens:
                ending = True
                continue
            scheduled[seq_id] = num_tokens - sequence.num_computed_tokens
            if num_tokens > sequence.num_reserved_tokens:
                short.append(sequence)
            if sequence.draft_token_ids:
                drafting.append(sequence)
        if ending:
            for sequence in short:
                if not self._reserve(sequence, len(sequence.token_ids)):
                    del scheduled[sequence.seq_id]
        elif short:
            step.preempted = tuple(self._make_room(short, step))
        return [s for s in drafting if s.draft_token_ids] if step.preempted else drafting

    def _make_room(self, short: list[Sequence], step: ScheduledStep) -> list[str]:
        """Blocks for the next tokens of these, oldest first; who was preempted for it and is not scheduled any more."""
        scheduled, preempted = step.num_scheduled_tokens, []
        for sequence in short:
            while sequence.seq_id in scheduled and not self._reserve(sequence, len(sequence.token_ids)):
                victim = self._victim()
                self._preempt(victim, step)
                del scheduled[victim.seq_id]
                preempted.append(victim.seq_id)
        return preempted

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Hold blocks for so many positions; False, and nothing changed, where the cache has none."""
        if num_tokens > sequence.num_reserved_tokens:
            seq_id = sequence.request.request_id
            if not self._kv.allocate(seq_id, num_tokens):
                return False
            sequence.num_reserved_tokens = self._kv.reserved_tokens(seq_id)
        return True

    def _grant_drafts(self, drafting: list[Sequence], step: ScheduledStep, budget: int) -> int:
        """To each as many drafts as the budget, the cache and max_model_len still allow; the budget that is left.

        They get only what no required token wants: nobody is preempted, and no token put off, for a guess.
        """
        scheduled, longest = step.num_scheduled_tokens, self._max_model_len
        for sequence in drafting:
            drafts, num_tokens = sequence.draft_token_ids, len(sequence.token_ids)
            room = min(budget, longest - num_tokens)
            granted = len(drafts)
            if granted > room:
                granted = max(0, room)
            if num_tokens + granted > sequence.num_reserved_tokens:
                while granted and not self._reserve(sequence, num_tokens + granted):
                    granted -= 1
            if granted < len(drafts):
                sequence.draft_token_ids = drafts[:granted]
            scheduled[sequence.request.request_id] += granted
            budget -= granted
        return budget

    def _victim(self) -> Sequence:
        """Who yields its blocks: the last to join, which `_put_back` lets be the first to join again."""
        return next(reversed(self._running.values()))

    def _preempt(self, sequence: Sequence, step: ScheduledStep) -> None:
        """It loses its row, its blocks and its drafts, and goes back to the queue."""
        seq_id = sequence.seq_id
        del self._running[seq_id]
        self._give_up_computed(sequence, step)
        self._release(seq_id)
        sequence.num_reserved_tokens = 0
        sequence.draft_token_ids = []
        sequence.preemptions += 1
        self._put_back(sequence)

    def _give_up_computed(self, sequence: Sequence, step: ScheduledStep) -> None:
        """What becomes of the keys and values of a sequence that is preempted and still holds its blocks: nothing."""
        sequence.num_computed_tokens = 0

    def _put_back(self, sequence: Sequence) -> None:
        """To the front of the queue: whoever yields is older than all that wait."""
        self._waiting[sequence.seq_id] = sequence
        self._waiting.move_to_end(sequence.seq_id, last=False)

    def _seat(self, sequence: Sequence) -> None:
        """From the front of the queue to the lowest free row, which it keeps until it leaves."""
        seq_id = sequence.seq_id
        del self._waiting[seq_id]
        self._running[seq_id] = sequence
        row = self._rows[seq_id] = heapq.heappop(self._free_rows)
        self._slots[row] = seq_id

    def _release(self, seq_id: str) -> None:
        """Give back the row and the blocks."""
        self._kv.free(seq_id)
        row = self._rows.pop(seq_id)
        self._slots[row] = None
        heapq.heappush(self._free_rows, row)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
