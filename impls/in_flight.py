"""A step that has been scheduled and whose tokens are not known yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from impls.request import Sequence
from impls.seams import KVCacheManager, KVReservation, ScheduledStep, Scheduler, StepBatch, StepStats, SwapSpace
from impls.step_batch import BatchRow, build_batch
from impls.step_queue import Launched


@dataclass
class InFlight:
    """What the engine keeps of a step until its tokens are there: as things stood when it was scheduled.

    decoding: the sequences whose logits it yields, in row order; positions: where the (first) token of each goes.
    computed: of each sequence that it runs, the positions that have K/V once it is done; who has lost its blocks
    meanwhile is in it no more. holds: who holds how much of the cache, and how much of that is written by its end.
    dead: those of which it computes nothing that is wanted. ready_s: when it could run. launched: None for a step that
    runs when it is resolved.
    """

    batch: StepBatch
    stats: StepStats
    decoding: list[Sequence]
    positions: dict[str, int]
    computed: dict[str, int]
    holds: list[tuple[str, int, int]]
    dead: set[str]
    ready_s: float = 0.0
    launched: Launched | None = None

    def lose(self, seq_id: str) -> None:
        """A sequence has lost its blocks: it was preempted, or aborted."""
        self.computed.pop(seq_id, None)

    def waste(self, seq_id: str) -> None:
        """A sequence has ended in the step before this one: if it runs here, its row is computed for nothing."""
        self.dead.add(seq_id)
        if self.computed.pop(seq_id, None) is not None:
            self.stats.scheduled.remove(seq_id)
            self.stats.running -= 1
            self.stats.decode_tokens -= 1
            self.stats.dead_rows += 1

    def reservations(self, rejected: Mapping[str, int]) -> list[KVReservation]:
        """``rejected``: of the positions that it computed, those of drafts that did not stand."""
        return [
            KVReservation(seq_id, reserved, written - rejected.get(seq_id, 0), seq_id in self.dead)
            for seq_id, reserved, written in self.holds
        ]


def prepare(
    step: ScheduledStep,
    stats: StepStats,
    sequences: Mapping[str, Sequence],
    scheduler: Scheduler,
    kv: KVCacheManager,
    swap: SwapSpace,
    device: torch.device,
) -> InFlight:
    """The step's batch, in which dead rows' logits come last. Every sequence's ``num_computed_tokens`` is what it will
    be when the step has run, so that the next one can be scheduled meanwhile."""
    dead = set(step.dead_rows)
    rows: list[BatchRow] = []
    decoding: list[Sequence] = []
    computed: dict[str, int] = {}
    for seq_id, count in step.num_scheduled_tokens.items():
        if seq_id in dead:
            continue
        sequence = sequences[seq_id]
        start, drafts = sequence.num_computed_tokens, sequence.draft_token_ids
        end = start + count
        tokens = sequence.token_ids[start:end] + drafts[: max(0, end - sequence.num_tokens)]
        reaches_end = end == sequence.num_tokens + len(drafts)
        required = count - len(drafts)
        stats.draft_tokens += len(drafts)
        if start < sequence.num_prompt_tokens or required > 1:  # the last part of a prompt may be one token
            stats.prefill_tokens += required
        else:
            stats.decode_tokens += required
        padding = step.padding_tokens.get(seq_id, 0)
        num_logits = len(drafts) + 1 if reaches_end else 0
        rows.append(BatchRow(seq_id, [*tokens, *([0] * padding)], start, kv.block_table(seq_id), num_logits, count))
        if reaches_end:
            decoding.append(sequence)
        computed[seq_id] = sequence.num_computed_tokens = end
    finished = {sequence.seq_id: sequence for sequence in scheduler.running if sequence.finished}
    for seq_id in step.dead_rows:
        position = finished[seq_id].num_computed_tokens - 1
        token = finished[seq_id].token_ids[position]
        rows.append(BatchRow(seq_id, [token], position, kv.block_table(seq_id), 1, 1))
    batch = build_batch(rows, kv.block_size, device)
    stats.query_lens, stats.kv_lens = batch.query_lens, batch.kv_lens
    stats.num_logits_rows = len(batch.logits_indices)
    holds = [(s.seq_id, kv.reserved_tokens(s.seq_id), s.num_computed_tokens) for s in scheduler.running]
    stats.kv_capacity_tokens, stats.kv_allocation_unit = kv.capacity_tokens, kv.block_size
    stats.swap_kept_bytes, stats.kv_shared_tokens = swap.kept_bytes, kv.shared_tokens
    held = sum(reserved for _, reserved, _ in holds) - stats.kv_shared_tokens
    stats.kv_free_tokens = kv.capacity_tokens - held
    positions = {sequence.seq_id: sequence.num_tokens for sequence in decoding}
    return InFlight(batch, stats, decoding, positions, computed, holds, dead)
