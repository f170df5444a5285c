"""What the proposers that run a model have in common: one token after another, batched over the sequences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.decoding.proposers.draft_sampler import DraftSampler
from impls.request import Sequence
from impls.seams import Arm, DraftTokens, ModelRunner, Proposer


class ChainedProposer(Proposer):
    """One ragged call over the tokens that the drafting model has not seen, then k - 1 calls of one token each.

    draft_sampling: as `DraftSampler`'s. A sequence whose drafting logits are not finite gets no further drafts.
    """

    model: str  # which model `ModelRunner.draft_forward` is to run

    def __init__(self, num_draft_tokens: int, draft_sampling: str, num_layers: int | None = None) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.sampler = DraftSampler(draft_sampling)
        self.num_layers = num_layers
        # The last draft is not fed back: positions num_tokens - 1 .. num_tokens + k - 2 are written.
        self.max_lookahead_tokens = max(1, num_draft_tokens - 1)

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return super().validate(arm) + DraftSampler.reasons(arm)

    @abstractmethod
    def num_seen(self, seq: Sequence) -> int:
        """Positions whose K/V the drafting model holds, for the tokens that the sequence has now."""

    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        wanted = {seq.seq_id: min(k.get(seq.seq_id, 0), self.num_draft_tokens) for seq in sequences}
        active = [seq for seq in sequences if wanted[seq.seq_id] > 0]
        starts = {seq.seq_id: min(self.num_seen(seq), seq.num_tokens - 1) for seq in active}
        tokens: dict[str, list[int]] = {seq.seq_id: seq.token_ids[starts[seq.seq_id] :] for seq in active}
        drafted: dict[str, list[int]] = {seq.seq_id: [] for seq in active}
        probs: dict[str, list[Tensor]] = {seq.seq_id: [] for seq in active}
        step = 0
        while active:
            logits = self._forward(tokens, starts, runner)
            chosen, distributions = self.sampler.choose(active, [step] * len(active), logits)
            for seq, token, q in zip(active, chosen, distributions, strict=True):
                if token >= 0:
                    drafted[seq.seq_id].append(token)
                if q is not None:
                    probs[seq.seq_id].append(q)
            step += 1
            active = [seq for seq in active if len(drafted[seq.seq_id]) == step < wanted[seq.seq_id]]
            tokens = {seq.seq_id: drafted[seq.seq_id][-1:] for seq in active}
            starts = {seq.seq_id: seq.num_tokens + step - 1 for seq in active}
        return {
            seq_id: DraftTokens(token_ids, torch.stack(probs[seq_id]) if probs[seq_id] else None)
            for seq_id, token_ids in drafted.items()
            if token_ids
        }

    def _forward(self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int], runner: ModelRunner) -> Tensor:
        """FP32 logits [S, V] of each sequence's last row, in the order of ``tokens``; V as the sampler has it."""
        logits = runner.draft_forward(tokens, starts, model=self.model, num_layers=self.num_layers)
        return torch.stack([logits[seq_id] for seq_id in tokens])
