"""What the training makes small, and what it is judged by.

The loss is the cross-entropy to the target's own distribution over the draft vocabulary (exact: its head on the stored
hidden states), plus, for EAGLE, a smooth L1 distance to those states; both at every step of an unrolled draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.draft_heads.batches import Batch
from scripts.draft_heads.fast_linear import linear
from scripts.draft_heads.modules import EagleHead, MedusaHeads

STEP_WEIGHT = 0.8  # of each further step of the unrolled draft
FEATURE_WEIGHT = 0.5


class Teacher:
    """What the target says at the rows of a batch."""

    def __init__(self, head: Tensor, token_ids: Tensor) -> None:
        self.head, self.token_ids = head[token_ids].contiguous(), token_ids

    @torch.no_grad()
    def distribution(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head).softmax(-1)


def loss_of(outputs: Sequence[Tensor], batch: Batch, teacher: Teacher, features: bool) -> Tensor:
    """Mean over the rows that each step may count, and over the steps by weight."""
    wanted = teacher.distribution(batch.hidden)
    scale = batch.hidden.pow(2).mean().sqrt()
    total, weights = torch.zeros(()), 0.0
    for step, hidden in enumerate(outputs):
        rows = (batch.age >= step).nonzero().squeeze(1)
        if not len(rows):
            continue
        logits = linear(hidden[rows], teacher.head)
        loss = F.cross_entropy(logits, wanted[rows])
        if features:
            loss = loss + FEATURE_WEIGHT * F.smooth_l1_loss(hidden[rows] / scale, batch.hidden[rows] / scale)
        total, weights = total + STEP_WEIGHT**step * loss, weights + STEP_WEIGHT**step
    return total / weights


@torch.no_grad()
def acceptance(
    module: EagleHead | MedusaHeads, sets: Sequence[Batch], teacher: Teacher, steps: int
) -> tuple[list[float], list[float]]:
    """Of greedy sequences: how often draft j + 1 is the target's token, where all drafts before it were; and where it
    alone is not, how often the head's second choice is: what another candidate for the position would add."""
    stood, tried, saved = torch.zeros(steps), torch.zeros(steps), torch.zeros(steps)
    for batch in sets:
        chain = torch.zeros(0)
        for step, hidden in enumerate(module(batch, steps)):
            drafted = teacher.token_ids[linear(hidden, teacher.head).topk(2, -1).indices]
            right, second = (drafted == batch.labels[:, None]).unbind(-1)
            before = torch.ones_like(right) if step == 0 else chain.roll(1, 0)
            counted = before & batch.greedy & (batch.age >= step)
            chain = right & counted
            stood[step] += chain.sum()
            tried[step] += counted.sum()
            saved[step] += (second & counted).sum()
    return (stood / tried.clamp(min=1)).tolist(), (saved / (tried - stood).clamp(min=1)).tolist()


def tokens_per_step(rates: Sequence[float]) -> float:
    return 1 + sum(math.prod(rates[: i + 1]) for i in range(len(rates)))
