"""How a prepared step turns into tokens: run here and now, or behind the step before it, which is still running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from impls.in_flight import InFlight
from impls.request import Sequence
from impls.seams import Clock, Decoder, DraftTokens, Executor, NonFiniteLogitsError
from impls.step_queue import PLACEHOLDER, Launched, StepQueue


@dataclass(frozen=True)
class Decoded:
    """The new tokens of each sequence. unsound: those whose logits are not finite: they fail, the others go on."""

    sequences: list[Sequence]
    new_tokens: list[list[int]]
    unsound: list[Sequence]


class StepRunner:
    """Runs a step when its result is asked for, unless it was launched before: then it waits for it.

    Steps that are launched follow one another without the host: where one reads a token that the one before it yields,
    a placeholder stands in the sequence until the host has the token too.
    """

    def __init__(
        self,
        executor: Executor,
        decoder: Decoder,
        drafts: Mapping[str, DraftTokens],
        clock: Clock,
        device: torch.device,
    ) -> None:
        """drafts: of each sequence that has any, as its proposer gave them, whenever a step is run."""
        self._executor, self._decoder, self._drafts = executor, decoder, drafts
        self._clock, self._device = clock, device
        self._queue = StepQueue(executor, decoder.sample, clock, device)

    def launch(self, flight: InFlight, before: InFlight | None) -> None:
        """Let it run behind ``before``, the step that was launched before it and is not resolved yet (None: all are),
        and leave a placeholder for each token that it yields and that another step may read."""
        yields = {} if before is None else {sequence.seq_id: row for row, sequence in enumerate(before.decoding)}
        decoding = {sequence.seq_id: sequence for sequence in flight.decoding}
        feed: dict[int, int] = {}
        rows = 0
        for seq_id, count in zip(flight.batch.seq_ids, flight.batch.query_lens, strict=True):
            rows += count
            if seq_id in decoding and decoding[seq_id].token_ids[-1] == PLACEHOLDER:  # then it has one row, this one
                feed[rows - 1] = yields[seq_id]
        requests, positions = [sequence.request for sequence in flight.decoding], list(flight.positions.values())
        behind = None if before is None else before.launched
        flight.launched = self._queue.launch(flight.batch, requests, positions, feed, behind)
        for sequence in flight.decoding:
            if sequence.num_tokens + 1 < sequence.max_total_tokens:
                sequence.token_ids.append(PLACEHOLDER)

    def result(self, flight: InFlight) -> tuple[Decoded, Tensor | None]:
        """What it yields, and its final-normed hidden states [T, hidden]; None of a step that was launched: nobody
        drafts behind such a one. How long it took is in its stats."""
        return self._run(flight) if flight.launched is None else self._wait(flight, flight.launched)

    def decode(self, decoding: list[Sequence], logits: Tensor) -> Decoded:
        """From logits [R, vocab]: those of ``decoding`` come first, a row for each draft and one more."""
        if not decoding:  # a step that computed no more than parts of prompts
            return Decoded([], [], [])
        counts = [len(sequence.draft_token_ids) + 1 for sequence in decoding]
        rows = logits[: sum(counts)]  # what lies behind them belongs to dead rows
        try:
            return Decoded(decoding, self._decoder.decode(decoding, rows, self._drafts), [])
        except NonFiniteLogitsError as error:
            bad = frozenset(error.seq_ids)
        parts = zip(decoding, torch.split(rows, counts), strict=True)
        kept = [(sequence, part) for sequence, part in parts if sequence.seq_id not in bad]
        sound = [sequence for sequence, _ in kept]
        tokens = self._decoder.decode(sound, torch.cat([part for _, part in kept]), self._drafts) if kept else []
        return Decoded(sound, tokens, [sequence for sequence in decoding if sequence.seq_id in bad])

    def settle(self) -> None:
        """After this the host may touch the cache (`StepQueue.settle`)."""
        self._queue.settle()

    def close(self) -> None:
        self._queue.close()

    def _run(self, flight: InFlight) -> tuple[Decoded, Tensor]:
        stats = flight.stats
        logits, hidden = self._executor.execute(flight.batch)
        stats.gathered_bytes = self._executor.attention.gathered_bytes(flight.batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the decoder waits for the logits in any case; this splits the time
        mark = self._clock.now()
        stats.forward_s = mark - flight.ready_s
        stats.attention_s, stats.replayed = self._executor.attention_s, self._executor.replayed
        decoded = self.decode(flight.decoding, logits)
        stats.sample_s = self._clock.now() - mark
        return decoded, hidden

    def _wait(self, flight: InFlight, launched: Launched) -> tuple[Decoded, None]:
        """Less those that have ended since it was launched."""
        outcome, stats = launched.wait(), flight.stats
        stats.forward_s, stats.sample_s, stats.attention_s = outcome.forward_s, outcome.sample_s, outcome.attention_s
        stats.gathered_bytes, stats.replayed = outcome.gathered_bytes, outcome.replayed
        pairs = zip(flight.decoding, outcome.token_ids, strict=True)
        live = [(sequence, token) for sequence, token in pairs if not sequence.finished]
        sound = [(sequence, token) for sequence, token in live if token >= 0]
        unsound = [sequence for sequence, token in live if token < 0]
        return Decoded([sequence for sequence, _ in sound], [[token] for _, token in sound], unsound), None
