"""The step loop: schedule -> run -> verify -> commit. Composes the axes and knows none of them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.request import Request, Sequence
from impls.seams import (
    Clock,
    Decoder,
    DraftForward,
    DraftTokens,
    Emission,
    Executor,
    Fetch,
    KVCacheManager,
    KVReservation,
    NonFiniteLogitsError,
    Proposer,
    ScheduledStep,
    Scheduler,
    StepBatch,
    StepResult,
    StepStats,
    SwapSpace,
)
from impls.step_batch import BatchRow, build_batch


class Engine:
    """One serving engine. Single-threaded: the caller steps it and gets what each step emitted.

    ``draft_executor`` runs a draft model whose K/V lies in extra layers of the same blocks; None if the proposer needs
    none. ``swap`` keeps what a scheduler that preempts by swapping takes out. ``eos_token_ids`` end a request unless it
    asks to ignore them.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        kv: KVCacheManager,
        executor: Executor,
        decoder: Decoder,
        proposer: Proposer | None,
        draft_executor: Executor | None,
        clock: Clock,
        device: torch.device,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        weights_bytes: int,
        swap: SwapSpace,
    ) -> None:
        self.scheduler, self.kv, self.executor, self.decoder = scheduler, kv, executor, decoder
        self.proposer, self.draft_executor = proposer, draft_executor
        self.clock, self.device = clock, device
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.weights_bytes = weights_bytes
        self.swap = swap
        self.before_finish: Callable[[Sequence], None] = lambda sequence: None  # it has ended and holds its blocks yet
        self._sequences: dict[str, Sequence] = {}
        self._drafts: dict[str, DraftTokens] = {}
        self._draft_forwards: list[DraftForward] = []
        self._held_back: list[Emission] = []

    # --- the Target protocol ------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id!r} is already in the engine")
        self._add(Sequence(request))

    def resume(self, sequence: Sequence, fetch: Fetch) -> None:
        """Go on with a sequence that another engine has begun: ``fetch`` brings the K/V of its computed positions, once
        it has blocks for them. For schedulers that take up what waits in host memory."""
        if sequence.seq_id in self._sequences:
            raise ValueError(f"request {sequence.seq_id!r} is already in the engine")
        self.swap.expect(sequence.seq_id, fetch)
        self._add(sequence)

    def _add(self, sequence: Sequence) -> None:
        self._sequences[sequence.seq_id] = sequence
        self.scheduler.add(sequence, self.clock.now())

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or bool(self._held_back)

    def abort(self, request_id: str) -> None:
        if self._sequences.pop(request_id, None) is not None:
            self.scheduler.abort(request_id)
            self._forget(request_id)
            self._held_back = [emission for emission in self._held_back if emission.request_id != request_id]

    def close(self) -> None:
        for request_id in list(self._sequences):
            self.abort(request_id)

    @torch.inference_mode()
    def step(self, until: float) -> StepResult:
        start = self.clock.now()
        step = self.scheduler.schedule(start)
        emissions = [self._reject(seq_id, reason, start) for seq_id, reason in step.rejected.items()]
        for seq_id in step.preempted:
            if seq_id in step.swapped_out:  # its keys and values will be as they were: what a proposer knows stays true
                self._drafts.pop(seq_id, None)
            else:
                self._forget(seq_id)
        if step.is_empty:
            emissions = self._release(emissions)  # an abort may have ended the batch that held its tokens back
            if not emissions:
                wake = self.scheduler.next_event_s(start)
                self.clock.sleep_until(until if wake is None else min(until, wake))
            return StepResult(emissions)

        stats = self._open_stats(step, start)
        mark = self._lap(stats, "schedule_s", start)
        if step.swapped_out or step.swapped_in or step.copied_blocks:
            self._swap(step, stats)
            mark = self._lap(stats, "swap_s", mark)
        batch, decoding = self._prepare(step, stats)
        mark = self._lap(stats, "prepare_s", mark)
        logits, hidden = self.executor.execute(batch)
        stats.gathered_bytes = self.executor.attention.gathered_bytes(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the decoder waits for the logits in any case; this splits the time
        mark = self._lap(stats, "forward_s", mark)
        stats.attention_s = self.executor.attention_s
        decoding, new_tokens, unsound = self._decode(decoding, logits)
        mark = self._lap(stats, "sample_s", mark)
        emissions += self._commit(step, decoding, new_tokens, unsound, stats, mark)
        mark = self._lap(stats, "commit_s", mark)
        if self.proposer is not None and self.decoder.uses_proposer:
            self.proposer.observe(batch, hidden)
            self._propose(self.proposer)
            stats.draft_forwards, self._draft_forwards = self._draft_forwards, []
            mark = self._lap(stats, "propose_s", mark)
        stats.end_s = mark
        return StepResult(emissions, stats)

    # --- one step's parts ---------------------------------------------------------------------------------------------

    def _lap(self, stats: StepStats, phase: str, since: float) -> float:
        now = self.clock.now()
        setattr(stats, phase, now - since)
        return now

    def _open_stats(self, step: ScheduledStep, start: float) -> StepStats:
        dead = set(step.dead_rows)
        live = [seq_id for seq_id in step.num_scheduled_tokens if seq_id not in dead]
        return StepStats(
            start_s=start,
            padding_tokens=sum(step.padding_tokens.values()),
            dead_rows=len(dead),
            running=len(live),
            waiting=self.scheduler.num_waiting,
            preempted=len(step.preempted),
            preempted_ids=list(step.preempted),
            slot_request_ids=list(self.scheduler.slots),
            scheduled=live,
            cached_prompt_tokens={
                seq_id: min(cached, self._sequences[seq_id].num_prompt_tokens)
                for seq_id, cached in step.cached_tokens.items()
                if not self._sequences[seq_id].preemptions  # what it recomputes was its own, no hit (vllm#25780)
            },
        )

    def _swap(self, step: ScheduledStep, stats: StepStats) -> None:
        """All out before any in: a block may pass from one sequence to another within a step."""
        stats.swapped_out = len(step.swapped_out)
        for seq_id, blocks in step.swapped_out.items():
            stats.swapped_out_bytes += self.swap.swap_out(seq_id, blocks)
        for seq_id, blocks in step.swapped_in.items():
            stats.swapped_in_bytes += self.swap.swap_in(seq_id, blocks)
        self.swap.copy(tuple(step.copied_blocks.values()))
        stats.copied_blocks = len(step.copied_blocks)

    def _prepare(self, step: ScheduledStep, stats: StepStats) -> tuple[StepBatch, list[Sequence]]:
        """The batch and, in row order, the sequences whose logits it yields. Dead rows' logits come last."""
        dead = set(step.dead_rows)
        rows: list[BatchRow] = []
        decoding: list[Sequence] = []
        for seq_id, count in step.num_scheduled_tokens.items():
            if seq_id in dead:
                continue
            sequence = self._sequences[seq_id]
            start, drafts = sequence.num_computed_tokens, sequence.draft_token_ids
            tokens = (sequence.token_ids + drafts)[start : start + count]
            reaches_end = start + count == sequence.num_tokens + len(drafts)
            required = count - len(drafts)
            stats.draft_tokens += len(drafts)
            if start < sequence.num_prompt_tokens or required > 1:  # the last part of a prompt may be one token
                stats.prefill_tokens += required
            else:
                stats.decode_tokens += required
            padding = step.padding_tokens.get(seq_id, 0)
            num_logits = len(drafts) + 1 if reaches_end else 0
            table = self.kv.block_table(seq_id)
            rows.append(BatchRow(seq_id, [*tokens, *([0] * padding)], start, table, num_logits, count))
            if reaches_end:
                decoding.append(sequence)
        finished = {sequence.seq_id: sequence for sequence in self.scheduler.running if sequence.finished}
        for seq_id in step.dead_rows:
            position = finished[seq_id].num_computed_tokens - 1
            token = finished[seq_id].token_ids[position]
            rows.append(BatchRow(seq_id, [token], position, self.kv.block_table(seq_id), 1, 1))
        batch = build_batch(rows, self.kv.block_size, self.device)
        stats.query_lens, stats.kv_lens = batch.query_lens, batch.kv_lens
        stats.num_logits_rows = len(batch.logits_indices)
        return batch, decoding

    def _decode(
        self, decoding: list[Sequence], logits: Tensor
    ) -> tuple[list[Sequence], list[list[int]], list[Sequence]]:
        """Sequences with their new tokens, and those whose logits are not finite: they fail, the others go on."""
        if not decoding:  # a step that computed no more than parts of prompts
            return [], [], []
        counts = [len(sequence.draft_token_ids) + 1 for sequence in decoding]
        rows = logits[: sum(counts)]  # what lies behind them belongs to dead rows
        try:
            return decoding, self.decoder.decode(decoding, rows, self._drafts), []
        except NonFiniteLogitsError as error:
            bad = frozenset(error.seq_ids)
        parts = zip(decoding, torch.split(rows, counts), strict=True)
        kept = [(sequence, part) for sequence, part in parts if sequence.seq_id not in bad]
        sound = [sequence for sequence, _ in kept]
        tokens = self.decoder.decode(sound, torch.cat([part for _, part in kept]), self._drafts) if kept else []
        return sound, tokens, [sequence for sequence in decoding if sequence.seq_id in bad]

    def _commit(
        self,
        step: ScheduledStep,
        decoding: Seq[Sequence],
        new_tokens: Seq[Seq[int]],
        unsound: Seq[Sequence],
        stats: StepStats,
        now: float,
    ) -> list[Emission]:
        emissions: list[Emission] = []
        for sequence in unsound:
            sequence.finish_reason = "error"
            emissions.append(Emission(sequence.seq_id, (), now, "error", "the model's logits are not finite"))
        dead = set(step.dead_rows)
        for seq_id, count in step.num_scheduled_tokens.items():
            if seq_id not in dead:
                self._sequences[seq_id].num_computed_tokens += count
        for sequence, tokens in zip(decoding, new_tokens, strict=True):
            drafted = len(sequence.draft_token_ids)
            kept, reason = self._cut(sequence, tokens)
            accepted = min(len(tokens) - 1, len(kept))
            stats.accepted_tokens += accepted
            if drafted:
                stats.drafted[sequence.seq_id] = (drafted, accepted)
            sequence.draft_token_ids = []
            self._drafts.pop(sequence.seq_id, None)
            sequence.token_ids.extend(kept)
            sequence.num_computed_tokens = sequence.num_tokens - 1  # rejected drafts roll back; they are overwritten
            sequence.finish_reason = reason
            emissions.append(Emission(sequence.seq_id, tuple(kept), now, reason))
        if unsound:
            self.kv.reset_prefixes()  # K/V that gave such logits may be what others share, or would share next
        failed = {sequence.seq_id for sequence in unsound}
        for seq_id in step.num_scheduled_tokens:
            if seq_id not in dead and seq_id not in failed:
                self.kv.commit(seq_id, self._sequences[seq_id].num_computed_tokens)
        self._record_reservations(stats, dead)
        for sequence in (*decoding, *unsound):
            if sequence.finished:
                self._forget(sequence.seq_id)
                del self._sequences[sequence.seq_id]
                self.before_finish(sequence)
                self.scheduler.finish(sequence)
        return self._release(emissions)

    def _release(self, emissions: list[Emission]) -> list[Emission]:
        """`batching.emit=batch_end` shows what a caller of a batch pipeline sees: nothing until the batch is done."""
        if self.scheduler.emit == "step":
            return emissions
        self._held_back += emissions
        if any(slot is not None for slot in self.scheduler.slots):
            return []
        released, self._held_back = self._held_back, []
        now = self.clock.now()
        return [Emission(e.request_id, e.token_ids, now, e.finish_reason, e.error) for e in released]

    def _cut(self, sequence: Sequence, tokens: Seq[int]) -> tuple[list[int], str | None]:
        """Tokens up to a stop token (kept, as it was produced) or the length limit, and why it ends there."""
        sampling = sequence.request.sampling
        limit = min(sampling.max_tokens - sequence.num_output_tokens, self.max_model_len - sequence.num_tokens)
        kept: list[int] = []
        for token in tokens[:limit]:
            kept.append(token)
            if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.eos_token_ids):
                return kept, "stop"
        return kept, "length" if len(kept) == limit else None

    def _record_reservations(self, stats: StepStats, dead: set[str]) -> None:
        stats.kv_reservations = [
            KVReservation(s.seq_id, self.kv.reserved_tokens(s.seq_id), s.num_computed_tokens, s.seq_id in dead)
            for s in self.scheduler.running
        ]
        stats.kv_capacity_tokens = self.kv.capacity_tokens
        stats.swap_kept_bytes = self.swap.kept_bytes
        stats.kv_shared_tokens = self.kv.shared_tokens
        held = sum(hold.reserved for hold in stats.kv_reservations) - stats.kv_shared_tokens
        stats.kv_free_tokens = self.kv.capacity_tokens - held
        stats.kv_allocation_unit = self.kv.block_size

    def _propose(self, proposer: Proposer) -> None:
        """Draft for every sequence that decodes next. A draft's K/V needs room; without room there is no draft."""
        most: dict[str, int] = {}
        for sequence in self.scheduler.running:
            if not sequence.finished and sequence.num_computed_tokens == sequence.num_tokens - 1:
                room = min(sequence.max_total_tokens, self.max_model_len) - sequence.num_tokens - 1
                most[sequence.seq_id] = max(0, min(proposer.num_draft_tokens, room))
        wanted: dict[str, int] = {}
        sequences: list[Sequence] = []
        for seq_id, k in self.decoder.draft_lengths(most).items():
            if k <= 0:
                continue
            sequence = self._sequences[seq_id]
            written = sequence.num_tokens + min(k - 1, proposer.max_lookahead_tokens)  # the last draft is not fed
            if proposer.max_lookahead_tokens and not self.kv.allocate(seq_id, written):
                continue
            wanted[seq_id] = k
            sequences.append(sequence)
        if not sequences:
            return
        for seq_id, draft in proposer.propose(sequences, wanted, self).items():
            if draft.token_ids:
                self._drafts[seq_id] = draft
                self._sequences[seq_id].draft_token_ids = list(draft.token_ids)

    def draft_forward(
        self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int], *, model: str, num_layers: int | None = None
    ) -> dict[str, Tensor]:
        """`ModelRunner` for the proposer: K/V goes to the blocks that the sequences already hold."""
        executor = self.draft_executor if model == "draft" else self.executor
        if executor is None:
            raise ValueError("this arm has no draft model")
        batch = self.draft_batch(tokens, starts)
        logits = executor.draft(batch, num_layers)
        gathered = executor.attention.gathered_bytes(batch)
        self.record_draft(DraftForward(model, num_layers, batch.query_lens, batch.kv_lens, gathered))
        return dict(zip(tokens, logits, strict=True))

    def draft_batch(self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int]) -> StepBatch:
        rows = [
            BatchRow(seq_id, ids, starts[seq_id], self.kv.block_table(seq_id), 1, len(ids))
            for seq_id, ids in tokens.items()
        ]
        return build_batch(rows, self.kv.block_size, self.device)

    def record_draft(self, forward: DraftForward) -> None:
        self._draft_forwards.append(forward)

    def _reject(self, seq_id: str, reason: str, now: float) -> Emission:
        del self._sequences[seq_id]
        self._forget(seq_id)
        return Emission(seq_id, (), now, "rejected", reason)

    def _forget(self, seq_id: str) -> None:
        self._drafts.pop(seq_id, None)
        self.swap.drop(seq_id)
        self.decoder.forget(seq_id)
        if self.proposer is not None:
            self.proposer.forget(seq_id)
