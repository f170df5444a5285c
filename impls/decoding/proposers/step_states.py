"""The target's hidden states of the step that has just run, which the heads trained on them draft from."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.request import Sequence
from impls.seams import StepBatch


class StepStates:
    """Nothing is copied: a later step may overwrite them, so they are read before it."""

    def __init__(self, batch: StepBatch, hidden: Tensor) -> None:
        """hidden: [T, hidden] of the batch's rows."""
        self._hidden = hidden
        self._first: dict[str, int] = {}  # which row position 0 of a sequence would be
        first = 0
        for seq_id, count, end in zip(batch.seq_ids, batch.query_lens, batch.kv_lens, strict=True):
            self._first[seq_id] = first + count - end
            first += count

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._first

    def behind_last_token(self, sequences: Seq[Sequence]) -> Tensor:
        """[S, hidden]: of the position before each one's last token, which is not computed yet: the state that the
        target chose that token from. All have run in the step and decode next."""
        rows = [self._first[seq.seq_id] + seq.num_tokens - 2 for seq in sequences]
        return self._hidden[torch.tensor(rows, device=self._hidden.device)]
