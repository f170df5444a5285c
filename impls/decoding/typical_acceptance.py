"""Medusa's typical acceptance (Cai et al., ICML 2024, section 2.3.1): drafts stand that the target finds not unlikely.

Not exact: what comes out is not distributed as the target alone would have it. A draft x stands where
p(x) > min(epsilon, delta * exp(-H(p))), H being the entropy of p in nats: the surer the target, the more is asked of
the draft, up to epsilon. No chance decides, and whom a draft was drawn from does not matter. The token behind the last
that stands is the target's argmax, so that a step always yields one. At temperature 0 p is one-hot and H is 0: with
epsilon < 1 the rule is then the greedy one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.decoding.verifier import count_leading, first_rows
from impls.request import Sequence


def thresholds(probs: Tensor, epsilon: float, delta: float) -> Tensor:
    """FP32 [R]: what a draft's probability has to exceed in each row of ``probs`` [R, V]."""
    entropy = torch.special.entr(probs).sum(1)
    return (delta * torch.exp(-entropy)).clamp_(max=epsilon)


def accept_typical(sequences: Seq[Sequence], probs: Tensor, epsilon: float, delta: float) -> list[int]:
    """How many drafts of each sequence stand. probs: FP32 [R, V], the target's processed distributions, in row order;
    a sequence owns a row for each draft and one more."""
    least = thresholds(probs, epsilon, delta)
    accepted = []
    for seq, start in zip(sequences, first_rows(sequences), strict=True):
        rows = slice(start, start + len(seq.draft_token_ids))
        drafts = torch.tensor(seq.draft_token_ids, dtype=torch.int64, device=probs.device).unsqueeze(1)
        stands = probs[rows].gather(1, drafts).squeeze(1) > least[rows]
        accepted.append(count_leading(stands.tolist()))
    return accepted
