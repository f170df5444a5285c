"""Verification of drafts: exact rejection sampling, which leaves the target's distribution as it was.

Leviathan, Kalman, Matias (ICML 2023); Chen et al. (2023). A draft x drawn from q is *accepted* with probability
min(1, p(x)/q(x)); the first rejected one is replaced by a draw from max(p - q, 0) (*recovered*); if all stand, the
target adds one of its own (*bonus*). A draft without probabilities is one-hot: accepted with p(x), recovered from p
without x. That rule is exact for any draft, however it was chosen. Draws of different purpose never share noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
from torch import Tensor

from impls.decoding import sampler
from impls.decoding.counter_random import Purpose, position_keys, uniform
from impls.request import Sequence
from impls.seams import DraftTokens


def row_counts(sequences: Seq[Sequence]) -> list[int]:
    """Rows of logits that each sequence owns: one a draft and one for the token after them."""
    return [len(seq.draft_token_ids) + 1 for seq in sequences]


def first_rows(sequences: Seq[Sequence]) -> list[int]:
    return list(accumulate(row_counts(sequences), initial=0))[:-1]


def final_rows(starts: Seq[int], accepted: Seq[int]) -> list[int]:
    """The row that decides each sequence's last token: the first rejected draft's, or the bonus row."""
    return [start + count for start, count in zip(starts, accepted, strict=True)]


def count_leading(verdicts: Seq[bool]) -> int:
    """How many drafts stand before the first that falls."""
    return next((i for i, stands in enumerate(verdicts) if not stands), len(verdicts))


def accept_greedy(sequences: Seq[Sequence], target_ids: Seq[int]) -> list[int]:
    """How many drafts of each sequence are the target's argmax, row by row, before the first that is not."""
    return [
        count_leading([draft == target_ids[start + j] for j, draft in enumerate(seq.draft_token_ids)])
        for seq, start in zip(sequences, first_rows(sequences), strict=True)
    ]


def accept_uniforms(sequences: Seq[Sequence], device: torch.device) -> list[list[float]]:
    """The float64 uniform that decides each draft, per sequence."""
    owners = [seq.request for seq in sequences for _ in seq.draft_token_ids]
    positions = [seq.num_tokens + j for seq in sequences for j in range(len(seq.draft_token_ids))]
    keys = position_keys(owners, positions, Purpose.ACCEPT, device)
    numbers = iter(uniform(keys).tolist())
    return [[next(numbers) for _ in seq.draft_token_ids] for seq in sequences]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), not normalised: what replaces a rejected draft is drawn from it."""
    return (p - q).clamp_(min=0)


class RandomVerification:
    """The sampled sequences of one step. probs: FP32 [R, V], the target's processed distributions, in row order."""

    def __init__(self, sequences: Seq[Sequence], probs: Tensor, drafts: Mapping[str, DraftTokens]) -> None:
        self.sequences, self.probs = sequences, probs
        self.starts = first_rows(sequences)
        # q: FP32 [Q, V], the drafts' distributions where there are any; q_row[i]: where those of sequence i begin.
        self.q: Tensor | None = None
        self.q_row: dict[int, int] = {}
        tensors: list[Tensor] = []
        tokens: list[int] = []
        for i, seq in enumerate(sequences):
            proposed = drafts.get(seq.seq_id)
            if seq.draft_token_ids and proposed is not None and proposed.probs is not None:
                self.q_row[i] = len(tokens)
                tensors.append(proposed.probs[: len(seq.draft_token_ids)])
                tokens += seq.draft_token_ids
        if tensors:
            self.q = torch.cat(tensors).to(probs.device)
            index = torch.arange(len(tokens), device=probs.device), torch.tensor(tokens, device=probs.device)
            # A token that its own distribution gives nothing (or NaN) was not drawn from it: one-hot.
            unsound = ~(self.q[index] > 0)
            self.q[unsound] = 0.0
            self.q[index] = torch.where(unsound, 1.0, self.q[index])
            self._q_of_token: list[float] = self.q[index].tolist()

    def accept(self) -> list[int]:
        """How many drafts of each sequence stand: p(x)/q(x) >= u until the first that fails, in float64."""
        rows = [
            start + j
            for start, seq in zip(self.starts, self.sequences, strict=True)
            for j in range(len(seq.draft_token_ids))
        ]
        tokens = [token for seq in self.sequences for token in seq.draft_token_ids]
        p = iter(self.probs[rows, tokens].tolist())
        accepted = []
        for i, uniforms in enumerate(accept_uniforms(self.sequences, self.probs.device)):
            first = self.q_row.get(i)
            q = [1.0] * len(uniforms) if first is None else self._q_of_token[first : first + len(uniforms)]
            accepted.append(count_leading([next(p) >= u * q_x for u, q_x in zip(uniforms, q, strict=True)]))
        return accepted

    def final_tokens(self, accepted: Seq[int]) -> list[int]:
        """The recovered or bonus token of each sequence, from one race over [S, V]."""
        target = self.probs[final_rows(self.starts, accepted)]
        weights = target.clone()
        rejected = [i for i, seq in enumerate(self.sequences) if accepted[i] < len(seq.draft_token_ids)]
        one_hot = [i for i in rejected if i not in self.q_row]
        weights[one_hot, [self.sequences[i].draft_token_ids[accepted[i]] for i in one_hot]] = 0.0
        drawn = [i for i in rejected if i in self.q_row]
        if drawn and self.q is not None:
            weights[drawn] = residual(weights[drawn], self.q[[self.q_row[i] + accepted[i] for i in drawn]])
        # Rounding may leave nothing where p equals q; then p is the residual's limit.
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, target)
        purposes = [Purpose.SAMPLE] * len(self.sequences)
        for i in rejected:
            purposes[i] = Purpose.RECOVER
        positions = [seq.num_tokens + count for seq, count in zip(self.sequences, accepted, strict=True)]
        keys = position_keys([seq.request for seq in self.sequences], positions, purposes, self.probs.device)
        tokens: list[int] = sampler.race(weights, keys).tolist()
        return tokens
