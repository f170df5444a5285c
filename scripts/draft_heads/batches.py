"""Generated sequences as training batches: rows of all sequences one after another, and a grid of those that draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from scripts.draft_heads.shards import Generated


class Batch:
    """T rows, one a token but each sequence's last. Row s holds the embedding of token s and the hidden state of s - 1.

    targets: int64 [R], the rows that draft: all from the first generated token on. hidden: FP32 [R, hidden], the
    target's state of those rows, which its head turns into the distribution of token s + 1; ``labels`` is that token.
    age: int64 [R], how many rows of its sequence draft before it: step j means something where age >= j.
    """

    def __init__(self, sequences: Sequence[Generated], embedding: Tensor) -> None:
        counts = [len(s.hidden) for s in sequences]
        starts = [min(s.num_prompt_tokens, count) for s, count in zip(sequences, counts, strict=True)]
        ids = torch.cat([s.tokens[:-1] for s in sequences]).long()
        hidden = torch.cat([s.hidden for s in sequences]).float()
        self.embedded = embedding[ids].float()
        self.positions = torch.cat([torch.arange(count) for count in counts])
        self.hidden_before = torch.where(self.positions[:, None] > 0, hidden.roll(1, 0), 0.0)
        self.length = max(counts)
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        first = torch.tensor(starts)
        self.targets = (self.positions >= first[owner]).nonzero().squeeze(1)
        self.hidden = hidden[self.targets]
        self.labels = torch.cat([s.tokens[1:] for s in sequences]).long()[self.targets]
        self.age = (self.positions - first[owner])[self.targets]
        self._slots = owner * self.length + self.positions
        self._size = len(counts)
        self._width = int(self.age.max()) + 1
        self._cells = owner[self.targets] * self._width + self.age
        self.query_positions = first[:, None] + torch.arange(self._width)  # past a sequence's end: never read back
        self.greedy = torch.tensor([s.temperature == 0 for s in sequences])[owner][self.targets]

    def padded(self, rows: Tensor) -> Tensor:
        """[T, ...] to [B, length, ...], zeros behind each sequence."""
        grid = rows.new_zeros(self._size * self.length, *rows.shape[1:]).index_copy(0, self._slots, rows)
        return grid.view(self._size, self.length, *rows.shape[1:])

    def on_grid(self, rows: Tensor) -> Tensor:
        """[R, ...] to [B, Q, ...], by age."""
        grid = rows.new_zeros(self._size * self._width, *rows.shape[1:]).index_copy(0, self._cells, rows)
        return grid.view(self._size, self._width, *rows.shape[1:])

    def from_grid(self, grid: Tensor) -> Tensor:
        return grid.flatten(0, 1)[self._cells]

    def shifted(self, rows: Tensor, first: Tensor) -> Tensor:
        """[R, ...] where each row is the one before it in its sequence, the first ones those of ``first``."""
        young = (self.age == 0).view(-1, *[1] * (rows.dim() - 1))
        return torch.where(young, first, rows.roll(1, 0))


def epochs(sequences: Sequence[Generated], embedding: Tensor, rows: int, seed: int) -> Iterator[Batch]:
    """Endless batches of about ``rows`` drafting rows; sequences of like length share one, so that little is padded."""
    draw = np.random.default_rng(np.random.SeedSequence(seed))
    while True:
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i].tokens) + draw.integers(48))
        groups = list(grouped([sequences[i] for i in order], rows))
        for i in draw.permutation(len(groups)):
            yield Batch(groups[i], embedding)


def grouped(sequences: Sequence[Generated], rows: int) -> Iterator[list[Generated]]:
    group: list[Generated] = []
    held = 0
    for sequence in sequences:
        drafting = len(sequence.tokens) - 1 - sequence.num_prompt_tokens
        if drafting < 1:
            continue
        group.append(sequence)
        held += drafting
        if held >= rows:
            yield group
            group, held = [], 0
    if group:
        yield group
