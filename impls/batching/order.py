"""In which order those that wait are admitted, where that is not the order of their arrival."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Container, Iterable

from impls.request import Sequence

ORDERS = ("fcfs", "shortest_first", "priority")
Rank = Callable[[Sequence, float], float]


def ranking(order: str, ageing_tokens_per_s: float) -> Rank:
    """The rank, lowest first, of a sequence that is added at ``now_s``.

    shortest_first: by prompt tokens, less ``ageing_tokens_per_s`` for each second of waiting. As everybody ages alike,
    that is the same as adding them up to the arrival once, and the order of two never changes; whoever arrives (longest
    prompt / ageing) seconds after a request stays behind it, so nobody starves. priority: `Request.priority`, strictly:
    a class waits for as long as more urgent ones keep coming (as in vLLM).
    """
    if order == "priority":
        return lambda sequence, now_s: sequence.request.priority
    return lambda sequence, now_s: sequence.num_prompt_tokens + ageing_tokens_per_s * now_s


class RankedQueue:
    """Who joins next (the lowest rank) and who yields (the highest); equals in order of arrival.

    A rank is fixed when a sequence is added and kept through preemptions. One total order for joining and yielding is
    what lets all end: the first of it is never preempted, so it advances until it is done, and then the next is first.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._arrivals = itertools.count()
        self._keys: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], str]] = []  # may hold entries of some that wait no longer

    def add(self, sequence: Sequence, now_s: float) -> None:
        self._keys[sequence.seq_id] = (self._rank(sequence, now_s), next(self._arrivals))
        self.wait(sequence.seq_id)

    def wait(self, seq_id: str) -> None:
        """It waits, for the first time or again."""
        heapq.heappush(self._heap, (self._keys[seq_id], seq_id))

    def first(self, waiting: Container[str]) -> str:
        """Of ``waiting``, which must not be empty."""
        while True:
            key, seq_id = self._heap[0]
            if seq_id in waiting and self._keys[seq_id] == key:
                return seq_id
            heapq.heappop(self._heap)

    def last(self, running: Iterable[str]) -> str:
        return max(running, key=self._keys.__getitem__)

    def remove(self, seq_id: str) -> None:
        """It has ended."""
        del self._keys[seq_id]
