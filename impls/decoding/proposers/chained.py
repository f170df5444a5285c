"""What the proposers that run a model have in common: one token after another, batched over the sequences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.decoding import sampler
from impls.decoding.counter_random import Purpose, position_keys
from impls.request import Sequence
from impls.seams import Arm, DraftTokens, ModelRunner, Proposer

DRAFT_SAMPLING = ("request", "greedy")


class ChainedProposer(Proposer):
    """One ragged call over the tokens that the drafting model has not seen, then k - 1 calls of one token each.

    draft_sampling: ``request`` draws a sampled request's drafts from the drafting model's distribution, processed by
    the request's own temperature, top-k and top-p, and records it; ``greedy`` takes the argmax (one-hot). Greedy
    requests are drafted greedily either way. A sequence whose drafting logits are not finite gets no further drafts.
    """

    model: str  # which model `ModelRunner.draft_forward` is to run

    def __init__(self, num_draft_tokens: int, draft_sampling: str, num_layers: int | None = None) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.draft_sampling = draft_sampling
        self.num_layers = num_layers
        # The last draft is not fed back: positions num_tokens - 1 .. num_tokens + k - 2 are written.
        self.max_lookahead_tokens = max(1, num_draft_tokens - 1)

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        reasons = super().validate(arm)
        sampling = arm.axes.get("proposer", {}).get("draft_sampling", "request")
        if sampling not in DRAFT_SAMPLING:
            reasons.append(f"proposer.draft_sampling={sampling} must be one of {', '.join(DRAFT_SAMPLING)}")
        return reasons

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
            chosen = self._choose(active, torch.stack([logits[seq.seq_id] for seq in active]), step, probs)
            for seq, token in zip(active, chosen, strict=True):
                if token >= 0:
                    drafted[seq.seq_id].append(token)
            step += 1
            active = [seq for seq in active if len(drafted[seq.seq_id]) == step < wanted[seq.seq_id]]
            tokens = {seq.seq_id: drafted[seq.seq_id][-1:] for seq in active}
            starts = {seq.seq_id: seq.num_tokens + step - 1 for seq in active}
        return {
            seq_id: DraftTokens(token_ids, torch.stack(probs[seq_id]) if probs[seq_id] else None)
            for seq_id, token_ids in drafted.items()
            if token_ids
        }

    def _forward(
        self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int], runner: ModelRunner
    ) -> dict[str, Tensor]:
        """FP32 logits [vocab] of each sequence's last row."""
        return runner.draft_forward(tokens, starts, model=self.model, num_layers=self.num_layers)

    def _choose(self, active: Seq[Sequence], logits: Tensor, step: int, probs: dict[str, list[Tensor]]) -> list[int]:
        """The next draft of each sequence, -1 where there is none; appends to ``probs`` what was sampled from."""
        chosen: list[int] = sampler.argmax(logits).tolist()
        rows = [
            i
            for i, seq in enumerate(active)
            if chosen[i] >= 0 and self.draft_sampling == "request" and seq.request.sampling.temperature > 0
        ]
        if rows:
            drawing = [active[i] for i in rows]
            q = sampler.distribution(logits[rows], [seq.request.sampling for seq in drawing])
            positions = [seq.num_tokens + step for seq in drawing]
            keys = position_keys([seq.request for seq in drawing], positions, Purpose.DRAFT, logits.device)
            for i, row, token in zip(rows, q, sampler.race(q, keys).tolist(), strict=True):
                chosen[i] = token
                probs[active[i].seq_id].append(row)
        return chosen
