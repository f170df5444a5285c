"""From a drafting model's logits to drafts, and to the distribution that each was drawn from."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.decoding import sampler
from impls.decoding.counter_random import Purpose, position_keys
from impls.request import Sequence
from impls.seams import Arm

DRAFT_SAMPLING = ("request", "greedy")


class DraftSampler:
    """draft_sampling: ``request`` draws a sampled request's drafts from the drafting model's distribution, processed by
    the request's own temperature, top-k and top-p, and records it; ``greedy`` takes the argmax (one-hot). Greedy
    requests are drafted greedily either way.

    token_ids: int64 [V], which token each column of the logits stands for, of a vocabulary of ``vocab_size``; None:
    they are the whole vocabulary.
    """

    def __init__(self, draft_sampling: str, token_ids: Tensor | None = None, vocab_size: int = 0) -> None:
        self._draws = draft_sampling == "request"
        self._token_ids, self._vocab_size = token_ids, vocab_size
        self._names: list[int] | None = None if token_ids is None else token_ids.tolist()

    @staticmethod
    def reasons(arm: Arm) -> list[str]:
        sampling = arm.axes.get("proposer", {}).get("draft_sampling", "request")
        if sampling in DRAFT_SAMPLING:
            return []
        return [f"proposer.draft_sampling={sampling} must be one of {', '.join(DRAFT_SAMPLING)}"]

    def choose(self, owners: Seq[Sequence], steps: Seq[int], logits: Tensor) -> tuple[list[int], list[Tensor | None]]:
        """The draft of each row, -1 where its logits are not finite, and FP32 [vocab_size] that it was drawn from; None
        where it is the argmax.

        logits: FP32 [R, V]; row r drafts for ``owners[r]`` the token behind ``steps[r]`` other drafts.
        """
        chosen: list[int] = sampler.argmax(logits).tolist()
        probs: list[Tensor | None] = [None] * len(chosen)
        rows = [
            i
            for i, seq in enumerate(owners)
            if self._draws and chosen[i] >= 0 and seq.request.sampling.temperature > 0
        ]
        if rows:
            drawing = [owners[i] for i in rows]
            q = sampler.distribution(logits[rows], [seq.request.sampling for seq in drawing])
            positions = [seq.num_tokens + steps[i] for i, seq in zip(rows, drawing, strict=True)]
            keys = position_keys([seq.request for seq in drawing], positions, Purpose.DRAFT, logits.device)
            for i, token, row in zip(rows, sampler.race(q, keys).tolist(), self._over_vocabulary(q), strict=True):
                chosen[i], probs[i] = token, row
        if self._names is not None:
            chosen = [self._names[column] if column >= 0 else -1 for column in chosen]
        return chosen, probs

    def _over_vocabulary(self, q: Tensor) -> Tensor:
        if self._token_ids is None:
            return q
        return torch.zeros(q.shape[0], self._vocab_size, device=q.device).index_copy_(1, self._token_ids, q)
