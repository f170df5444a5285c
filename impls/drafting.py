"""What the step loop does for a proposer: room for its drafts, a model to run, its drafts until they are verified."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.request import Sequence
from impls.seams import (
    Decoder,
    DraftForward,
    DraftTokens,
    Executor,
    KVCacheManager,
    ModelRunner,
    Proposer,
    Scheduler,
    StepBatch,
)
from impls.step_batch import BatchRow, build_batch


class Drafting(ModelRunner):
    """Drafts for whoever decodes next. K/V of a drafting model goes to the blocks that the sequences already hold.

    kept: what was drafted for each sequence, until it is verified or dropped.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        kv: KVCacheManager,
        decoder: Decoder,
        executor: Executor,
        draft_executor: Executor | None,
        device: torch.device,
    ) -> None:
        self._scheduler, self._kv, self._decoder, self._device = scheduler, kv, decoder, device
        self._executors = {"target": executor, "draft": draft_executor}
        self._forwards: list[DraftForward] = []
        self.kept: dict[str, DraftTokens] = {}

    def propose(self, proposer: Proposer) -> list[DraftForward]:
        """Set ``draft_token_ids`` of whoever gets drafts; what that ran. Where a draft's K/V finds no room there is no
        draft."""
        self._forwards = []
        most: dict[str, int] = {}
        running = {sequence.seq_id: sequence for sequence in self._scheduler.running}
        for seq_id, sequence in running.items():
            if not sequence.finished and sequence.num_computed_tokens == sequence.num_tokens - 1:
                room = sequence.max_total_tokens - sequence.num_tokens - 1
                most[seq_id] = max(0, min(proposer.num_draft_tokens, room))
        wanted: dict[str, int] = {}
        sequences: list[Sequence] = []
        for seq_id, k in self._decoder.draft_lengths(most).items():
            if k <= 0:
                continue
            sequence = running[seq_id]
            written = sequence.num_tokens + min(k - 1, proposer.max_lookahead_tokens)  # the last draft is not fed
            if proposer.max_lookahead_tokens and not self._kv.allocate(seq_id, written):
                continue
            wanted[seq_id] = k
            sequences.append(sequence)
        if sequences:
            for seq_id, draft in proposer.propose(sequences, wanted, self).items():
                if draft.token_ids:
                    self.kept[seq_id] = draft
                    running[seq_id].draft_token_ids = list(draft.token_ids)
        return self._forwards

    def draft_forward(
        self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int], *, model: str, num_layers: int | None = None
    ) -> dict[str, Tensor]:
        executor = self._executors[model]
        if executor is None:
            raise ValueError("this arm has no draft model")
        batch = self.draft_batch(tokens, starts)
        logits = executor.draft(batch, num_layers)
        gathered = executor.attention.gathered_bytes(batch)
        self.record_draft(DraftForward(model, num_layers, batch.query_lens, batch.kv_lens, gathered))
        return dict(zip(tokens, logits, strict=True))

    def draft_batch(self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int]) -> StepBatch:
        rows = [
            BatchRow(seq_id, ids, starts[seq_id], self._kv.block_table(seq_id), 1, len(ids))
            for seq_id, ids in tokens.items()
        ]
        return build_batch(rows, self._kv.block_size, self._device)

    def record_draft(self, forward: DraftForward) -> None:
        self._forwards.append(forward)
