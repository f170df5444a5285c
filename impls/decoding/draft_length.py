"""How many tokens to draft: as many as are expected to raise the tokens a second of the next step, none if none do.

For each sequence a running estimate of how often a draft stands; for the batch what its rows cost. The chosen lengths
maximise expected tokens / expected seconds over all the sequences together (goodput: Liu et al., "Optimizing
Speculative Decoding for Serving Large Language Models Using Goodput", 2024, which has one length for all of them).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

from impls.seams import DecodeCosts

FIRST_ACCEPTANCE, FIRST_TRIALS = 0.7, 8.0  # before anything is known: drafting is given a chance
POOL_MEMORY, OWN_MEMORY = 256.0, 32.0  # drafts after which a verdict counts 1/e: of all sequences, of one
POOL_WEIGHT = 4.0  # verdicts of its own that weigh as much as what all sequences have shown
PROBE_SHARE = 0.02  # of the time: what finding out whether drafts have become worth their cost may take


@dataclass
class _Verdicts:
    """Drafts that were reached, and those of them that stood; older ones fade."""

    memory: float
    stood: float = 0.0
    reached: float = 0.0

    def add(self, stood: int, reached: int) -> None:
        kept = math.exp(-reached / self.memory)
        self.stood, self.reached = self.stood * kept + stood, self.reached * kept + reached


class AcceptanceEstimate:
    """The probability that a draft stands if all before it did: each sequence's own, drawn towards that of all."""

    def __init__(self) -> None:
        self._all = _Verdicts(POOL_MEMORY, FIRST_ACCEPTANCE * FIRST_TRIALS, FIRST_TRIALS)
        self._own: dict[str, _Verdicts] = {}

    def observe(self, seq_id: str, drafted: int, accepted: int) -> None:
        """What follows a rejected draft was never reached: it says nothing."""
        reached = min(accepted + 1, drafted)
        self._all.add(accepted, reached)
        self._own.setdefault(seq_id, _Verdicts(OWN_MEMORY)).add(accepted, reached)

    def of(self, seq_id: str) -> float:
        shared = self._all.stood / self._all.reached
        own = self._own.get(seq_id)
        return shared if own is None else (own.stood + POOL_WEIGHT * shared) / (own.reached + POOL_WEIGHT)

    def forget(self, seq_id: str) -> None:
        self._own.pop(seq_id, None)


class CostCurve:
    """Seconds by a count, between the counts that were measured and beyond them in a straight line; never falling, as
    more rows that look cheaper are noise."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._counts = sorted(seconds)
        self._seconds = list(accumulate((seconds[count] for count in self._counts), max))
        self._found: dict[int, float] = {}

    def __call__(self, count: int) -> float:
        if count not in self._found:
            self._found[count] = self._interpolate(count)
        return self._found[count]

    def _interpolate(self, count: int) -> float:
        if count <= self._counts[0] or len(self._counts) == 1:
            return self._seconds[0]
        after = min(bisect_right(self._counts, count), len(self._counts) - 1)
        (x0, x1), (y0, y1) = self._counts[after - 1 : after + 1], self._seconds[after - 1 : after + 1]
        return y0 + (y1 - y0) * (count - x0) / (x1 - x0)


def best_lengths(acceptance: Seq[float], most: Seq[int], step_s: Seq[float], draft_s: float) -> list[int]:
    """The lengths, one a sequence and at most ``most``, with the highest expected tokens a second.

    acceptance: of each sequence's drafts, in [0, 1]. step_s: seconds of a step with 0, 1, 2, ... drafts in all, as many
    as ``most`` allows. draft_s: of drafting one more token for the batch, which the deepest sequence decides.

    A j-th draft is worth a^j tokens. For a given depth the cost depends on the number of drafts alone, so the best ones
    are those worth most, and as worth falls with j they are the first ones of each sequence: trying each depth and
    each number finds the optimum over all combinations.
    """
    drafts = [(a**j, j, i) for i, (a, k) in enumerate(zip(acceptance, most, strict=True)) for j in range(1, k + 1)]
    drafts.sort(key=lambda draft: (-draft[0], draft[1]))  # of equal ones the shallower first
    best, chosen = len(most) / step_s[0], (0, 0)
    for depth in range(1, max(most, default=0) + 1):
        tokens, number = float(len(most)), 0
        for worth, j, _ in drafts:
            if j <= depth:
                tokens, number = tokens + worth, number + 1
                rate = tokens / (step_s[number] + draft_s * depth)
                if rate > best:
                    best, chosen = rate, (depth, number)
    lengths = [0] * len(most)
    depth, number = chosen
    for i in [i for _, j, i in drafts if j <= depth][:number]:
        lengths[i] += 1
    return lengths


class AdaptiveDraftLength:
    """`best_lengths` by running estimates. Without costs nothing can be weighed: every draft is then worth it.

    A sequence without drafts shows nothing of its acceptance. One draft each is therefore given to the sequences that
    have been without for longest, whenever that costs no more than `PROBE_SHARE` of the time since the last one, and
    not at all where even drafts that all stand would not pay. Deterministic: no clock, no random numbers.
    """

    def __init__(self) -> None:
        self._estimate = AcceptanceEstimate()
        self._step_s: CostCurve | None = None
        self._draft_s: CostCurve | None = None
        self._without: dict[str, int] = {}  # steps since its last draft
        self._saved_s = 0.0  # towards the next probe

    def calibrate(self, costs: DecodeCosts) -> None:
        """ValueError if a cost is missing."""
        if not costs.step_s or not costs.draft_s:
            raise ValueError("draft lengths that adapt need what steps and drafts cost")
        self._estimate, self._without, self._saved_s = AcceptanceEstimate(), {}, 0.0
        self._step_s, self._draft_s = CostCurve(costs.step_s), CostCurve(costs.draft_s)

    def observe(self, seq_id: str, drafted: int, accepted: int) -> None:
        """The verdict on a sequence's drafts: how many stood before the first that fell."""
        if drafted:
            self._estimate.observe(seq_id, drafted, accepted)

    def forget(self, seq_id: str) -> None:
        self._estimate.forget(seq_id)
        self._without.pop(seq_id, None)

    def choose(self, most: Mapping[str, int]) -> Mapping[str, int]:
        if self._step_s is None or self._draft_s is None or not any(most.values()):
            return most
        names, limits = list(most), list(most.values())
        step_s = [self._step_s(len(names) + drafts) for drafts in range(sum(limits) + 1)]
        draft_s = self._draft_s(len(names))
        lengths = best_lengths([self._estimate.of(name) for name in names], limits, step_s, draft_s)
        self._probe(names, limits, lengths, step_s, draft_s)
        for name, length in zip(names, lengths, strict=True):
            self._without[name] = 0 if length else self._without.get(name, 0) + 1
        return dict(zip(names, lengths, strict=True))

    def _probe(self, names: Seq[str], limits: Seq[int], lengths: list[int], step_s: Seq[float], draft_s: float) -> None:
        """Adds one draft to ``lengths`` where it is time to."""
        idle = [i for i, length in enumerate(lengths) if limits[i] and not length]
        certain = [1.0 if limits[i] and not length else self._estimate.of(names[i]) for i, length in enumerate(lengths)]
        if not idle or not any(best_lengths(certain, limits, step_s, draft_s)[i] for i in idle):
            self._saved_s = 0.0
            return
        drafts = sum(lengths)
        self._saved_s += PROBE_SHARE * step_s[drafts]
        cost = step_s[drafts + 1] - step_s[drafts] + (0.0 if drafts else draft_s)
        if cost <= self._saved_s:
            self._saved_s = 0.0
            lengths[max(idle, key=lambda i: self._without.get(names[i], 0))] = 1
