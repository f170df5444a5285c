"""Iteration-level scheduling (Orca, Yu et al. 2022) with preemption (vLLM, Kwon et al. 2023)."""

from __future__ import annotations

from typing import Any

from impls.batching.order import LONGEST_PREFIX_FIRST, ORDERS, joining_order
from impls.batching.queues import QueueScheduler
from impls.request import Sequence
from impls.seams import Arm, KVCacheManager, ScheduledStep

PREEMPTION = ("recompute", "swap")
OPTIONS = ("preemption", "max_swapped_tokens", "order", "ageing_tokens_per_s", "watermark")


class ContinuousBatching(QueueScheduler):
    """Sequences join and leave at every step: the running ones first, then whoever waits, in the order asked for.

    A prompt joins whole, within ``max_num_batched_tokens`` and ``max_num_seqs``. Nobody overtakes: while the first that
    waits does not fit, nobody joins. So a prompt (or, after a preemption, prompt and outputs) that is too long to
    run beside the present rows gets in as they leave, at the latest alone: the limit is at least max_model_len.
    A step that preempts admits nobody, or the same blocks would be fought over in every step.

    preemption: what a sequence that must yield loses. ``recompute``: all, its tokens are computed again; ``swap``: its
    place only, keys and values wait in host memory. Where nobody overtakes by rank (fcfs), those that wait there were
    all running together, so host memory holds at most about a cache's worth. max_swapped_tokens: how many positions may
    wait there (None: any number); whoever finds no room loses all, as with ``recompute``.
    Samples of one request wait for the first of them to compute their prompt and begin as its forks; where none runs
    any more, or the cache holds sequences in one piece, each computes it.
    order: who joins first, and who yields last (see `order`). watermark: the share of blocks that an admission leaves
    free, so that it is not followed by a preemption; it does not apply where nobody runs.
    """

    def __init__(
        self,
        *,
        kv: KVCacheManager,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int | None = None,
        preemption: str = "recompute",
        max_swapped_tokens: int | None = None,
        order: str = "fcfs",
        ageing_tokens_per_s: float = 100.0,
        watermark: float = 0.0,
    ) -> None:
        super().__init__(
            kv=kv,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        reasons = option_reasons(preemption, max_swapped_tokens, order, ageing_tokens_per_s, watermark)
        if reasons:
            raise ValueError("; ".join(reasons))
        self.preemption, self.order = preemption, order
        self._blocks_left_free = int(watermark * kv.num_blocks)
        self._ranked = joining_order(order, ageing_tokens_per_s, kv)
        self.max_swapped_tokens = max_swapped_tokens
        self._in_host: dict[str, int] = {}  # positions of whole blocks that wait in host memory, by sequence

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        config = arm.axes["batching"]
        reasons = super().validate(arm) + option_reasons(**{name: config[name] for name in OPTIONS if name in config})
        if config.get("order") == LONGEST_PREFIX_FIRST and "_target_" not in arm.axes.get("prefix", {}):
            reasons.append(
                f"batching.order={LONGEST_PREFIX_FIRST}: needs prefix=hash_chain or radix, or nothing is ever found"
            )
        return reasons

    def add(self, sequence: Sequence, now_s: float) -> None:
        """What a sequence has computed elsewhere waits like what was swapped out here, but not in this host memory."""
        super().add(sequence, now_s)
        if self._ranked is not None and sequence.seq_id in self._waiting:
            self._ranked.add(sequence, now_s)

    def schedule(self, now_s: float) -> ScheduledStep:
        step = ScheduledStep(rejected=self._take_rejected())
        drafting = self._grow_running(step)
        budget = self.max_num_batched_tokens - sum(step.num_scheduled_tokens.values())
        budget = self._grant_drafts(drafting, step, budget)
        if not step.preempted:
            self._admit(step, budget)
        return step

    def finish(self, sequence: Sequence) -> bool:
        del self._running[sequence.seq_id]
        self._release(sequence.seq_id)
        self._forget(sequence.seq_id)
        return True

    def abort(self, seq_id: str) -> None:
        if seq_id in self._running:
            self.finish(self._running[seq_id])
        elif self._rejected.pop(seq_id, None) is None:
            del self._waiting[seq_id]
            self._forget(seq_id)

    def _admit(self, step: ScheduledStep, budget: int) -> int:
        """Let those that wait join while there are rows, tokens and blocks; the budget that is left."""
        while self._waiting and self._free_rows and budget > 0:
            sequence = self._first_waiting()
            seq_id = sequence.seq_id
            begins = not sequence.num_computed_tokens  # else it brings what it has computed along
            sibling = self._sibling(sequence) if begins else None
            if sibling is not None:
                if not self._fork(sequence, sibling):
                    break  # the prompt of both is being computed
            else:
                cached = self._kv.begin(seq_id, sequence.token_ids, sequence.max_total_tokens, reuse=begins)
                if begins:
                    sequence.num_computed_tokens = sequence.num_reserved_tokens = cached
            count = self._portion(len(sequence.token_ids) - sequence.num_computed_tokens, budget)
            if not count or not self._leaves_watermark(sequence) or not self._reserve(sequence, sequence.num_tokens):
                self._kv.free(seq_id)
                sequence.num_reserved_tokens = 0
                if begins:
                    sequence.num_computed_tokens = 0
                break
            self._seat(sequence)
            if sibling is not None:
                self._copy_last_block(sequence, sibling, step)
            if begins:
                step.cached_tokens[seq_id] = sequence.num_computed_tokens
            else:
                step.swapped_in[seq_id] = self._written_blocks(sequence)
                self._in_host.pop(seq_id, None)
            step.num_scheduled_tokens[seq_id] = count
            budget -= count
        return budget

    def _sibling(self, sequence: Sequence) -> Sequence | None:
        """The running sample of the same request that has computed most, where the cache lets it be forked."""
        parent_id = sequence.request.parent_id
        if parent_id is None or not self._kv.can_fork:
            return None
        siblings = (other for other in self._running.values() if other.request.parent_id == parent_id)
        return max(siblings, key=lambda other: other.num_computed_tokens, default=None)

    def _fork(self, sequence: Sequence, sibling: Sequence) -> bool:
        """Begin with the prompt that its sibling has computed, but for the last of its own tokens: it needs logits of
        its own. False if the sibling is not so far."""
        known = min(sequence.num_prompt_tokens, sequence.num_tokens - 1)
        if not self._kv.fork(sequence.seq_id, sequence.token_ids, sibling.seq_id, known):
            return False
        sequence.num_computed_tokens = known
        sequence.num_reserved_tokens = known // self._kv.block_size * self._kv.block_size
        return True

    def _copy_last_block(self, sequence: Sequence, sibling: Sequence, step: ScheduledStep) -> None:
        """Copy on write: what it shares are full blocks; in the next one both are about to write, each in its own."""
        full, rest = divmod(sequence.num_computed_tokens, self._kv.block_size)
        if rest:
            source, target = (self._kv.block_table(each.seq_id)[full] for each in (sibling, sequence))
            step.copied_blocks[sequence.seq_id] = (source, target)

    def _written_blocks(self, sequence: Sequence) -> tuple[int, ...]:
        """Those of its blocks that hold what it has computed, in order."""
        count = -(-sequence.num_computed_tokens // self._kv.block_size)
        return tuple(self._kv.block_table(sequence.seq_id)[:count])

    def _portion(self, missing: int, budget: int) -> int:
        """How many of its missing tokens a sequence that joins computes in this step; 0: it cannot join yet."""
        return missing if missing <= budget else 0

    def _leaves_watermark(self, sequence: Sequence) -> bool:
        if not self._blocks_left_free or not self._running:
            return True
        wanted = -(-(sequence.num_tokens - sequence.num_reserved_tokens) // self._kv.block_size)
        return wanted + self._blocks_left_free <= self._kv.num_free_blocks

    def _first_waiting(self) -> Sequence:
        if self._ranked is None:
            return next(iter(self._waiting.values()))
        return self._waiting[self._ranked.first(self._waiting)]

    def _victim(self) -> Sequence:
        if self._ranked is None:
            return super()._victim()
        return self._running[self._ranked.last(self._running)]

    def _put_back(self, sequence: Sequence) -> None:
        super()._put_back(sequence)
        if self._ranked is not None:
            self._ranked.wait(sequence.seq_id)

    def _give_up_computed(self, sequence: Sequence, step: ScheduledStep) -> None:
        blocks = self._written_blocks(sequence)
        tokens = len(blocks) * self._kv.block_size
        limit = self.max_swapped_tokens
        if self.preemption == "recompute" or (limit is not None and sum(self._in_host.values()) + tokens > limit):
            super()._give_up_computed(sequence, step)
            return
        self._in_host[sequence.seq_id] = tokens
        step.swapped_out[sequence.seq_id] = blocks

    def _forget(self, seq_id: str) -> None:
        self._in_host.pop(seq_id, None)
        if self._ranked is not None:
            self._ranked.remove(seq_id)


def option_reasons(
    preemption: Any = "recompute",
    max_swapped_tokens: Any = None,
    order: Any = "fcfs",
    ageing_tokens_per_s: Any = 100.0,
    watermark: Any = 0.0,
) -> list[str]:
    """Why these options of continuous batching cannot work."""
    ageing, most = ageing_tokens_per_s, max_swapped_tokens
    reasons = []
    if preemption not in PREEMPTION:
        reasons.append(f"batching.preemption={preemption}: must be one of {', '.join(PREEMPTION)}")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        reasons.append(f"batching.max_swapped_tokens={most}: must be null or a whole number of at least 0")
    if most is not None and preemption == "recompute":
        reasons.append(f"batching.max_swapped_tokens={most}: only with batching.preemption=swap")
    if order not in ORDERS:
        reasons.append(f"batching.order={order}: must be one of {', '.join(ORDERS)}")
    if not _is_number(ageing) or not 0 < ageing < float("inf"):
        reasons.append(f"batching.ageing_tokens_per_s={ageing}: must be a finite number above 0, or somebody starves")
    if not _is_number(watermark) or not 0 <= watermark < 1:
        reasons.append(f"batching.watermark={watermark}: must be a share of the blocks, at least 0 and below 1")
    return reasons


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
