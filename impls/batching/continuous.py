"""Iteration-level scheduling (Orca, Yu et al. 2022) with preemption by recomputation (vLLM)."""

from __future__ import annotations

from impls.batching.queues import QueueScheduler
from impls.request import Sequence
from impls.seams import ScheduledStep


class ContinuousBatching(QueueScheduler):
    """Sequences join and leave at every step: the running ones first, then whoever waits, first come, first served.

    A prompt joins whole, within ``max_num_batched_tokens`` and ``max_num_seqs``. Nobody overtakes: while the oldest
    that waits does not fit, nobody joins. So a prompt (or, after a preemption, prompt and outputs) that is too long to
    run beside the present rows gets in as they leave, at the latest alone: the limit is at least max_model_len.
    A step that preempts admits nobody, or the same blocks would be fought over in every step.
    """

    def schedule(self, now_s: float) -> ScheduledStep:
        step = ScheduledStep(rejected=self._take_rejected())
        budget = self._grow_running(step, self.max_num_batched_tokens)
        if not step.preempted:
            self._admit(step, budget)
        return step

    def finish(self, sequence: Sequence) -> bool:
        del self._running[sequence.seq_id]
        self._release(sequence.seq_id)
        return True

    def abort(self, seq_id: str) -> None:
        if seq_id in self._running:
            self.finish(self._running[seq_id])
        elif self._rejected.pop(seq_id, None) is None:
            del self._waiting[seq_id]

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        waiting, allocate, scheduled = self._waiting, self._kv.allocate, step.num_scheduled_tokens
        while waiting and self._free_rows:
            sequence = next(iter(waiting.values()))
            seq_id, num_tokens = sequence.request.request_id, len(sequence.token_ids)
            cached = self._kv.begin(seq_id, sequence.token_ids, sequence.max_total_tokens)
            missing = num_tokens - cached
            if missing > budget or not allocate(seq_id, num_tokens):
                self._kv.free(seq_id)
                return
            self._seat(sequence)
            sequence.num_computed_tokens = step.cached_tokens[seq_id] = cached
            scheduled[seq_id] = missing
            budget -= missing
