"""In which order those that wait are admitted, where that is not the order of their arrival."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Protocol

from impls.request import Sequence
from impls.seams import KVCacheManager

LONGEST_PREFIX_FIRST = "longest_prefix_first"
ORDERS = ("fcfs", "shortest_first", "priority", LONGEST_PREFIX_FIRST)
LOOK_AHEAD = 128  # so many of the oldest are looked up in the cache whenever one may join (as SGLang limits it)
CLASS_TOKENS = 10_000  # what a class of priority counts as, in tokens of a prompt
Rank = Callable[[Sequence, float], float]


def ranking(order: str, ageing_tokens_per_s: float) -> Rank:
    """The rank, lowest first, of a sequence that is added at ``now_s``.

    shortest_first: by prompt tokens, less ``ageing_tokens_per_s`` for each second of waiting. As everybody ages alike,
    that is the same as adding them up to the arrival once, and the order of two never changes; whoever arrives (longest
    prompt / ageing) seconds after a request stays behind it, so nobody starves. priority: by `Request.priority`, whose
    classes are `CLASS_TOKENS` apart and age alike: (`CLASS_TOKENS` / ageing) seconds of waiting make up for one of them
    (vLLM's are strict: there a class waits for as long as more urgent ones keep coming).
    """
    if order == "priority":
        return lambda sequence, now_s: CLASS_TOKENS * sequence.request.priority + ageing_tokens_per_s * now_s
    return lambda sequence, now_s: sequence.num_prompt_tokens + ageing_tokens_per_s * now_s


class JoiningOrder(Protocol):
    """Who of those that wait joins next, and who of those that run yields."""

    def add(self, sequence: Sequence, now_s: float) -> None: ...

    def wait(self, seq_id: str) -> None:
        """It waits, for the first time or again."""

    def first(self, waiting: Mapping[str, Sequence]) -> str:
        """Of ``waiting``, which must not be empty."""

    def last(self, running: Iterable[str]) -> str:
        """Of ``running``, in the order in which they joined; must not be empty."""

    def remove(self, seq_id: str) -> None:
        """It has ended."""


def joining_order(order: str, ageing_tokens_per_s: float, kv: KVCacheManager) -> JoiningOrder | None:
    """None for fcfs, where the queues themselves say it."""
    if order == "fcfs":
        return None
    if order == LONGEST_PREFIX_FIRST:
        return LongestPrefixFirst(kv, ageing_tokens_per_s)
    return RankedQueue(ranking(order, ageing_tokens_per_s))


class LongestPrefixFirst:
    """Who finds most of its tokens in the cache joins next (SGLang's order, Zheng et al. 2024), and so before what it
    would find has been evicted; whoever joined last yields. Equals in the order of the queue.

    Each second of waiting counts as ``ageing_tokens_per_s`` tokens found. Nobody can find more than max_model_len, so
    nobody that arrives (max_model_len / ageing) seconds after a request goes before it, and those before it are so many
    as came by then: nobody starves. The first that joined is never preempted while others run, so it advances until it
    is done, and then the next is first.
    """

    def __init__(self, kv: KVCacheManager, ageing_tokens_per_s: float) -> None:
        self._kv, self._ageing = kv, ageing_tokens_per_s
        self._added_s: dict[str, float] = {}

    def add(self, sequence: Sequence, now_s: float) -> None:
        self._added_s[sequence.seq_id] = now_s

    def wait(self, seq_id: str) -> None:
        """The queue has it."""

    def first(self, waiting: Mapping[str, Sequence]) -> str:
        return min(itertools.islice(waiting, LOOK_AHEAD), key=lambda seq_id: self._rank(waiting[seq_id]))

    def last(self, running: Iterable[str]) -> str:
        return deque(running, maxlen=1).pop()

    def remove(self, seq_id: str) -> None:
        del self._added_s[seq_id]

    def _rank(self, sequence: Sequence) -> float:
        known = sequence.num_computed_tokens  # what was swapped out waits in host memory
        found = known or self._kv.num_cached_tokens(sequence.token_ids)
        return self._ageing * self._added_s[sequence.seq_id] - found


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
        heapq.heappush(self._heap, (self._keys[seq_id], seq_id))

    def first(self, waiting: Container[str]) -> str:
        while True:
            key, seq_id = self._heap[0]
            if seq_id in waiting and self._keys[seq_id] == key:
                return seq_id
            heapq.heappop(self._heap)

    def last(self, running: Iterable[str]) -> str:
        return max(running, key=self._keys.__getitem__)

    def remove(self, seq_id: str) -> None:
        del self._keys[seq_id]
