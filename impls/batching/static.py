"""Request-level batching: a batch is formed, runs to its last token, and only then makes room for the next."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Any

from impls.batching.queues import QueueScheduler
from impls.request import Sequence
from impls.seams import Arm, KVCacheManager, ScheduledStep

EMIT = ("step", "batch_end")


class StaticBatching(QueueScheduler):
    """What a server without iteration-level scheduling pays, modelled honestly.

    A batch starts when it cannot grow (``max_num_seqs``, the rows of its padded prompts, the cache) or when its oldest
    request has waited ``timeout_s`` since it was added. Prompts are padded to the longest as real rows. A sequence that
    finished becomes a dead row: it recomputes its last position in every step, keeps its row and its reservation and
    does not grow, until the last one finishes; then all is freed at once. ``running`` lists dead rows too.

    Where others hold so much of the cache that the oldest does not fit (on a prefill worker, prompts that have not been
    fetched yet), no batch starts before they have let go.

    A batch that outgrows the cache (only where a sequence does not reserve its whole length) preempts its youngest live
    sequence, which leaves it for a later batch; as that one need not wait for company, every batch finishes somebody.
    """

    def __init__(
        self,
        *,
        kv: KVCacheManager,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int | None = None,
        timeout_s: float = 0.05,
        emit: str = "step",
    ) -> None:
        super().__init__(
            kv=kv,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        reasons = option_reasons(timeout_s, emit)
        if reasons:
            raise ValueError("; ".join(reasons))
        self.timeout_s, self.emit = timeout_s, emit
        self._dead: dict[str, Sequence] = {}
        self._deadline_s: dict[str, float] = {}  # when a waiting sequence's batch starts, complete or not

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        config = arm.axes["batching"]
        return super().validate(arm) + option_reasons(config.get("timeout_s", 0.05), config.get("emit", "step"))

    def add(self, sequence: Sequence, now_s: float) -> None:
        super().add(sequence, now_s)
        if sequence.seq_id in self._waiting:
            self._deadline_s[sequence.seq_id] = now_s + self.timeout_s

    def schedule(self, now_s: float) -> ScheduledStep:
        step = ScheduledStep(rejected=self._take_rejected())
        if self._running:
            drafting = self._grow_running(step)
            live_rows = sum(step.num_scheduled_tokens.values())
            self._grant_drafts(drafting, step, self.max_num_batched_tokens - len(self._dead) - live_rows)
            for seq_id in step.preempted:
                self._deadline_s[seq_id] = -math.inf
            if not self._running:  # what the dead rows hold left no room for the last live one
                self._end_batch()
        if self._running:
            live = step.num_scheduled_tokens
            step.num_scheduled_tokens = {seq_id: live.get(seq_id, 1) for seq_id in self._slots if seq_id is not None}
            step.dead_rows = tuple(self._dead)
        else:
            self._form_batch(step, now_s)
        return step

    def finish(self, sequence: Sequence) -> bool:
        """True for the last of the batch: its cache, and that of every dead row, is free now."""
        self._dead[sequence.seq_id] = self._running.pop(sequence.seq_id)
        if self._running:
            return False
        self._end_batch()
        return True

    def abort(self, seq_id: str) -> None:
        """A finished sequence cannot be aborted (KeyError): its row stays until the batch ends."""
        if seq_id in self._running:
            del self._running[seq_id]
            self._release(seq_id)
            if not self._running:
                self._end_batch()
        elif self._rejected.pop(seq_id, None) is None:
            del self._waiting[seq_id]
            del self._deadline_s[seq_id]

    def next_event_s(self, now_s: float) -> float | None:
        if self._running or not self._next_members():
            return None
        return self._deadline_s[next(iter(self._waiting))]

    @property
    def running(self) -> Seq[Sequence]:
        held = (seq_id for seq_id in self._slots if seq_id is not None)
        return [self._running.get(seq_id) or self._dead[seq_id] for seq_id in held]

    def _form_batch(self, step: ScheduledStep, now_s: float) -> None:
        if not (members := self._next_members()):
            return
        complete = len(members) == self.max_num_seqs or len(members) < len(self._waiting)
        if not complete and now_s < self._deadline_s[members[0].seq_id]:
            return
        longest = max(member.num_tokens for member in members)
        for member in members:
            seq_id = member.seq_id
            if not self._reserve(member, longest):
                raise RuntimeError(f"the cache cannot hold a batch of {len(members)} x {longest} tokens")
            self._seat(member)
            del self._deadline_s[seq_id]
            step.num_scheduled_tokens[seq_id] = member.num_tokens
            if member.num_tokens < longest:
                step.padding_tokens[seq_id] = longest - member.num_tokens

    def _next_members(self) -> list[Sequence]:
        """The longest run from the front of the queue whose padded prompts fit the step and the cache."""
        longest = count = 0
        for sequence in islice(self._waiting.values(), self.max_num_seqs):
            padded = max(longest, sequence.num_tokens)
            blocks = -(-padded // self._kv.block_size) * (count + 1)
            if padded * (count + 1) > self.max_num_batched_tokens or blocks > self._kv.num_free_blocks:
                break
            longest, count = padded, count + 1
        return list(islice(self._waiting.values(), count))

    def _end_batch(self) -> None:
        for seq_id in self._dead:
            self._release(seq_id)
        self._dead.clear()


def option_reasons(timeout_s: Any, emit: Any) -> list[str]:
    """Why these options of static batching cannot work."""
    reasons = []
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 <= timeout_s < math.inf:
        reasons.append(f"batching.timeout_s={timeout_s}: must be a finite number of seconds, at least 0")
    if emit not in EMIT:
        reasons.append(f"batching.emit={emit}: must be one of {', '.join(EMIT)}")
    return reasons
