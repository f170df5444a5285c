"""`generate` of transformers in static batches, a step at a time."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib import import_module
from typing import Any

import torch

from impls.request import Request, Sequence
from impls.seams import Clock, Emission, KVCacheManager, KVReservation, ScheduledStep, Scheduler, StepResult, StepStats
from impls.targets.causal_lm import kernels_of, resident_bytes
from impls.targets.halting import Halt, HaltingGeneration
from impls.targets.row_sampling import RowSampling

PAD = 0  # masked out wherever it stands


class GenerateTarget:
    """A batch is one call of `generate`, formed by ``scheduler``: the very policy that `batching=static` is elsewhere.

    Prompts are padded on the left and masked. A row ends at its own stop token or limit and is computed on until the
    last one ends. The keys and values are the library's `DynamicCache`: it grows by a position of every row and step,
    padding and ended rows included, and reserves nothing ahead. So a batch needs its longest prompt plus its longest
    answer for every row, which may be more than the ``max_model_len`` that ``kv`` sets aside for each.

    ``forward_s`` of a step is all that `generate` does for it: forward, its logits processors, the choice of the token.
    Sampling is seeded by the requests of the batch; see `RowSampling` for what it cannot promise.
    """

    def __init__(
        self,
        *,
        model: Any,
        scheduler: Scheduler,
        kv: KVCacheManager,
        clock: Clock,
        device: torch.device,
        eos_token_ids: Seq[int],
        max_model_len: int,
    ) -> None:
        self.max_model_len = max_model_len
        self.weights_bytes = resident_bytes(model)
        self._model, self._scheduler, self._kv, self._clock, self._device = model, scheduler, kv, clock, device
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[str, Sequence] = {}
        self._rows: list[Sequence] = []  # of the batch in flight, as they lie in its tensors
        self._cache_len = 0
        self._held_back: list[Emission] = []
        self._generation = HaltingGeneration()

    @property
    def kernels(self) -> Mapping[str, str]:
        return kernels_of(self._model)

    # --- the Target protocol ------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id!r} is already submitted")
        sequence = self._sequences[request.request_id] = Sequence(request)
        self._scheduler.add(sequence, self._clock.now())

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or bool(self._held_back)

    def abort(self, request_id: str) -> None:
        """Its row is computed on, as `generate` cannot drop one, until no other is left."""
        self._held_back = [emission for emission in self._held_back if emission.request_id != request_id]
        if self._sequences.pop(request_id, None) is not None:
            self._scheduler.abort(request_id)
            self._end_batch_if_over()

    def close(self) -> None:
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._generation.close()

    def step(self, until: float) -> StepResult:
        start = self._clock.now()
        step = self._scheduler.schedule(start)
        emissions = [self._reject(seq_id, reason, start) for seq_id, reason in step.rejected.items()]
        if step.is_empty:
            emissions = self._release(emissions)
            if not emissions:
                wake = self._scheduler.next_event_s(start)
                self._clock.sleep_until(until if wake is None else min(until, wake))
            return StepResult(emissions)
        scheduled_at = self._clock.now()
        stats = StepStats(start, schedule_s=scheduled_at - start)
        starts = not self._rows
        tokens = self._start(step) if starts else self._resume()
        computed_at = self._clock.now()
        stats.forward_s = computed_at - scheduled_at
        self._describe(stats, prefill=starts)
        emissions += self._commit(tokens, computed_at)
        self._end_batch_if_over()
        emissions = self._release(emissions)
        stats.end_s = self._clock.now()
        stats.commit_s = stats.end_s - computed_at
        return StepResult(emissions, stats)

    # --- the batch in flight ------------------------------------------------------------------------------------------

    def _start(self, step: ScheduledStep) -> list[int]:
        self._rows = [self._sequences[seq_id] for seq_id in step.num_scheduled_tokens]
        prompts = [sequence.token_ids for sequence in self._rows]
        self._cache_len = max(len(prompt) for prompt in prompts)
        padding = [self._cache_len - len(prompt) for prompt in prompts]
        ids = [[PAD] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (self._cache_len - pad) for pad in padding]
        return self._generation.start(lambda halt: self._generate(ids, mask, halt))

    def _generate(self, ids: Seq[Seq[int]], mask: Seq[Seq[int]], halt: Halt) -> None:
        transformers: Any = import_module("transformers")
        sampling = [sequence.request.sampling for sequence in self._rows]
        options: dict[str, Any] = {"do_sample": False}
        processors = transformers.LogitsProcessorList()
        if any(row.temperature > 0 for row in sampling):
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            processors.append(RowSampling(sampling))
            torch.manual_seed(hash(tuple(row.seed for row in sampling)))
        self._model.generate(
            torch.tensor(ids, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=max(row.max_tokens for row in sampling), pad_token_id=PAD, **options
            ),
            logits_processor=processors,
            stopping_criteria=transformers.StoppingCriteriaList([halt]),
        )

    def _resume(self) -> list[int]:
        self._cache_len += 1
        tokens = self._generation.resume([not self._is_live(row) for row in self._rows])
        if tokens is None:
            raise RuntimeError("generate returned before its rows had ended")
        return tokens

    def _is_live(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.seq_id) is sequence and not sequence.finished

    def _end_batch_if_over(self) -> None:
        """Let `generate` return, and its cache go, when no row is left that anybody waits for."""
        if not self._rows or any(map(self._is_live, self._rows)):
            return
        rows, self._rows = self._rows, []
        if self._generation.is_halted and self._generation.resume([True] * len(rows)) is not None:
            raise RuntimeError("generate goes on though all of its rows have ended")

    def _commit(self, tokens: Seq[int], now: float) -> list[Emission]:
        emissions: list[Emission] = []
        for sequence, token in zip(self._rows, tokens, strict=True):
            if not self._is_live(sequence):
                continue
            sampling = sequence.request.sampling
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.token_ids.append(token)
            if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self._eos_token_ids):
                sequence.finish_reason = "stop"
            elif sequence.num_output_tokens == sampling.max_tokens:
                sequence.finish_reason = "length"
            emissions.append(Emission(sequence.seq_id, (token,), now, sequence.finish_reason))
            self._kv.commit(sequence.seq_id, sequence.num_computed_tokens)
        for sequence in self._rows:
            if sequence.finished and self._sequences.pop(sequence.seq_id, None) is not None:
                self._scheduler.finish(sequence)
        return emissions

    def _release(self, emissions: list[Emission]) -> list[Emission]:
        """With `batching.emit=batch_end` nothing is shown until the batch is done."""
        if self._scheduler.emit == "step":
            return emissions
        self._held_back += emissions
        if self._rows:
            return []
        released, self._held_back = self._held_back, []
        now = self._clock.now()
        return [Emission(e.request_id, e.token_ids, now, e.finish_reason, e.error) for e in released]

    def _reject(self, seq_id: str, reason: str, now: float) -> Emission:
        del self._sequences[seq_id]
        return Emission(seq_id, (), now, "rejected", reason)

    def _describe(self, stats: StepStats, prefill: bool) -> None:
        """What is known of the step that has just run, before its tokens are committed."""
        rows, live = self._rows, [row for row in self._rows if self._is_live(row)]
        new = self._cache_len if prefill else 1
        stats.scheduled = [row.seq_id for row in live]
        stats.running, stats.dead_rows = len(live), len(rows) - len(live)
        stats.waiting, stats.slot_request_ids = self._scheduler.num_waiting, list(self._scheduler.slots)
        if prefill:
            stats.prefill_tokens = sum(row.num_tokens for row in live)
            stats.padding_tokens = new * len(rows) - stats.prefill_tokens
        else:
            stats.decode_tokens = len(live)
        stats.query_lens, stats.kv_lens = [new] * len(rows), [self._cache_len] * len(rows)
        stats.num_logits_rows = len(rows)
        for row in rows:
            kept = row.num_tokens if self._is_live(row) else 0
            stats.kv_reservations += [
                KVReservation(row.seq_id, kept, kept, False),
                KVReservation(row.seq_id, self._cache_len - kept, 0, True),  # padding, or all of an ended row
            ]
        stats.kv_capacity_tokens = self._kv.capacity_tokens
        stats.kv_free_tokens = max(0, self._kv.capacity_tokens - self._cache_len * len(rows))
