"""Which token a prompt begins with, so that no two prompts share a prefix that nobody asked for."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.random import SeedSequence

from workloads.errors import WorkloadError


class Vocabulary:
    """The ordinary tokens, in a seeded order, cut into three disjoint pools of first tokens.

    Measured prompts take theirs in turn from the first pool, shared prefixes from the second, warm-up from the third:
    the first 3/4, 3/16 and 1/16 of the vocabulary. A pool that is used up starts over, so that prompts may then share
    one first token, but no more than chance.
    """

    def __init__(self, vocab_size: int, special_token_ids: Collection[int], seed: SeedSequence) -> None:
        special = np.fromiter((t for t in special_token_ids if 0 <= t < vocab_size), dtype=np.int64)
        self.ordinary = np.setdiff1d(np.arange(vocab_size), special)
        if self.ordinary.size < 3:
            raise WorkloadError(f"vocab_size={vocab_size}: must leave at least 3 ordinary tokens to draw prompts from")
        order = np.random.default_rng(seed).permutation(self.ordinary)
        warmup = max(1, order.size // 16)
        group = max(1, order.size * 3 // 16)
        self._measured, self._group, self._warmup = np.split(order, [order.size - warmup - group, order.size - warmup])

    @property
    def num_distinct(self) -> int:
        """How many measured prompts differ in their very first token."""
        return int(self._measured.size)

    def measured(self, index: int) -> int:
        return int(self._measured[index % self._measured.size])

    def group(self, index: int) -> int:
        return int(self._group[index % self._group.size])

    def warmup(self, index: int) -> int:
        return int(self._warmup[index % self._warmup.size])
