"""The step loop: schedule -> run -> verify -> commit. Composes the axes and knows none of them by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from impls.drafting import Drafting
from impls.in_flight import InFlight, prepare
from impls.request import Request, Sequence
from impls.seams import (
    Clock,
    Decoder,
    Emission,
    Executor,
    Fetch,
    KVCacheManager,
    Proposer,
    ScheduledStep,
    Scheduler,
    StepResult,
    StepStats,
    SwapSpace,
)
from impls.step_runner import Decoded, StepRunner


class Engine:
    """One serving engine: the caller steps it and gets what each step emitted.

    ``depth`` is how many steps may be in flight: 1, or 2 where the executor overlaps. Then a step is scheduled and
    launched while the one before it runs, with a placeholder for each token that is not known yet; only after that is
    the earlier one resolved: its tokens are put in place of the placeholders, committed and emitted. What is launched
    runs in that order, so blocks may pass on at once: whoever gets one writes to it in a later step. A sequence whose
    token shows that it has ended has been launched once too often; that row is recorded as dead. (One that ends by its
    length is known beforehand, and is not scheduled again.) ``depth`` may be changed while there is no work.

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
        self._held_back: list[Emission] = []
        self.drafting = Drafting(
            scheduler=scheduler,
            kv=kv,
            decoder=decoder,
            executor=executor,
            draft_executor=draft_executor,
            device=device,
        )
        self.runner = StepRunner(executor, decoder, self.drafting.kept, clock, device)
        self.depth = 2 if executor.overlap else 1
        self._in_flight: deque[InFlight] = deque()

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
        return bool(self._sequences) or bool(self._held_back) or bool(self._in_flight)

    def abort(self, request_id: str) -> None:
        if (sequence := self._sequences.pop(request_id, None)) is not None:
            sequence.finish_reason = "aborted"
            self.scheduler.abort(request_id)
            self._forget(request_id)
            for flight in self._in_flight:
                flight.lose(request_id)
        self._held_back = [emission for emission in self._held_back if emission.request_id != request_id]

    def close(self) -> None:
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._in_flight.clear()
        self.runner.close()

    @torch.inference_mode()
    def step(self, until: float) -> StepResult:
        emissions: list[Emission] = []
        while len(self._in_flight) < self.depth and self._launch(emissions):
            pass
        if self._in_flight:
            return self._resolve(self._in_flight.popleft(), emissions)
        emissions = self._release(emissions)  # an abort may have ended the batch that held its tokens back
        if not emissions:
            wake = self.scheduler.next_event_s(self.clock.now())
            self.clock.sleep_until(until if wake is None else min(until, wake))
        return StepResult(emissions)

    # --- one step's parts ---------------------------------------------------------------------------------------------

    def _launch(self, emissions: list[Emission]) -> bool:
        """Schedule and prepare the next step, and let it run if steps overlap. False: there is none."""
        start = self.clock.now()
        step = self.scheduler.schedule(start)
        emissions += [self._reject(seq_id, reason, start) for seq_id, reason in step.rejected.items()]
        for seq_id in step.preempted:
            for flight in self._in_flight:
                flight.lose(seq_id)
            if seq_id in step.swapped_out:  # what it has computed comes back, and nothing that was written past that
                self.drafting.kept.pop(seq_id, None)
                if self.proposer is not None:
                    self.proposer.truncate(seq_id, self._sequences[seq_id].num_computed_tokens)
            else:
                self._forget(seq_id)
        if step.is_empty:
            assert not step.swapped_out, "a scheduler swaps out to make room for what it schedules"
            return False
        stats = self._open_stats(step, start)
        mark = self._lap(stats, "schedule_s", start)
        if step.swapped_out or step.swapped_in or step.copied_blocks:
            self._swap(step, stats)
            mark = self._lap(stats, "swap_s", mark)
        flight = prepare(step, stats, self._sequences, self.scheduler, self.kv, self.swap, self.device)
        if self.depth > 1:
            self.runner.launch(flight, self._in_flight[-1] if self._in_flight else None)
        flight.ready_s = self._lap(stats, "prepare_s", mark)
        self._in_flight.append(flight)
        return True

    def _resolve(self, flight: InFlight, emissions: list[Emission]) -> StepResult:
        """What a step yields: run it, or wait until it has run."""
        stats = flight.stats
        decoded, hidden = self.runner.result(flight)
        mark = self.clock.now()
        emissions += self._commit(flight, decoded, mark)
        mark = self._lap(stats, "commit_s", mark)
        if self.proposer is not None and self.decoder.uses_proposer:
            self.proposer.observe(flight.batch, hidden)
            stats.draft_forwards = self.drafting.propose(self.proposer)
            mark = self._lap(stats, "propose_s", mark)
        stats.end_s = mark
        for launched in self._in_flight:
            launched.stats.start_s = mark  # it was scheduled before, but had to wait: steps follow one another
        return StepResult(emissions, stats)

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
        self.runner.settle()
        stats.swapped_out = len(step.swapped_out)
        for seq_id, blocks in step.swapped_out.items():
            stats.swapped_out_bytes += self.swap.swap_out(seq_id, blocks)
        for seq_id, blocks in step.swapped_in.items():
            stats.swapped_in_bytes += self.swap.swap_in(seq_id, blocks)
        self.swap.copy(tuple(step.copied_blocks.values()))
        stats.copied_blocks = len(step.copied_blocks)

    def _commit(self, flight: InFlight, decoded: Decoded, now: float) -> list[Emission]:
        stats, computed, unsound = flight.stats, flight.computed, decoded.unsound
        emissions: list[Emission] = []
        rejected: dict[str, int] = {}
        for sequence in unsound:
            if drafted := len(sequence.draft_token_ids):  # none of them stands
                rejected[sequence.seq_id] = drafted
                computed[sequence.seq_id] -= drafted
            sequence.draft_token_ids = []
            sequence.finish_reason = "error"
            emissions.append(Emission(sequence.seq_id, (), now, "error", "the model's logits are not finite"))
        for sequence, tokens in zip(decoded.sequences, decoded.new_tokens, strict=True):
            seq_id, drafted = sequence.seq_id, len(sequence.draft_token_ids)
            position = flight.positions[seq_id]
            kept, reason = self._cut(sequence, position, tokens)
            accepted = min(len(tokens) - 1, len(kept))
            stats.accepted_tokens += accepted
            if drafted:
                stats.drafted[seq_id] = (drafted, accepted)
            sequence.draft_token_ids = []
            self.drafting.kept.pop(seq_id, None)
            sequence.token_ids[position : position + 1] = kept  # for the placeholder, if there is one
            if fallen := drafted + 1 - len(kept):  # drafts that do not stand: they are overwritten
                rejected[seq_id] = fallen
                sequence.num_computed_tokens -= fallen
                computed[seq_id] -= fallen
            sequence.finish_reason = reason
            emissions.append(Emission(seq_id, tuple(kept), now, reason))
        if unsound:
            self.kv.reset_prefixes()  # K/V that gave such logits may be what others share, or would share next
        failed = {sequence.seq_id for sequence in unsound}
        for seq_id, written in computed.items():
            if seq_id not in failed:
                self.kv.commit(seq_id, written)
        stats.kv_reservations = flight.reservations(rejected)
        for sequence in (*decoded.sequences, *unsound):
            if sequence.finished:
                self._finish(sequence, flight)
        return self._release(emissions)

    def _finish(self, sequence: Sequence, flight: InFlight) -> None:
        """It has ended with this step, whatever was scheduled since."""
        seq_id = sequence.seq_id
        self._forget(seq_id)
        del self._sequences[seq_id]
        for later in self._in_flight:
            later.waste(seq_id)
        if seq_id not in flight.computed:  # it was preempted since, and waits
            self.scheduler.abort(seq_id)
            return
        sequence.num_computed_tokens = flight.computed[seq_id]
        self.before_finish(sequence)
        self.scheduler.finish(sequence)

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

    def _cut(self, sequence: Sequence, position: int, tokens: Seq[int]) -> tuple[list[int], str | None]:
        """Tokens up to a stop token (kept, as it was produced) or the length limit, and why it ends there."""
        sampling, limit = sequence.request.sampling, sequence.max_total_tokens - position
        kept: list[int] = []
        for token in tokens[:limit]:
            kept.append(token)
            if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.eos_token_ids):
                return kept, "stop"
        return kept, "length" if len(kept) == limit else None

    def _reject(self, seq_id: str, reason: str, now: float) -> Emission:
        del self._sequences[seq_id]
        self._forget(seq_id)
        return Emission(seq_id, (), now, "rejected", reason)

    def _forget(self, seq_id: str) -> None:
        self.drafting.kept.pop(seq_id, None)
        self.swap.drop(seq_id)
        self.decoder.forget(seq_id)
        if self.proposer is not None:
            self.proposer.forget(seq_id)
