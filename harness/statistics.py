"""Paired ratios of two arms, their intervals and verdicts (DESIGN section 6). Pure functions, no state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev

CONFIDENCE = 0.95
ADAPTIVE_CONFIDENCE = 0.98  # an adaptive study looks after every block, so it stops and reports at a stricter level

# Two-sided quantiles of Student's t for 1, 2, ... degrees of freedom: t(.975) and t(.99).
T_QUANTILES = {
    CONFIDENCE: (12.706204736174698, 4.302652729749462, 3.182446305283709, 2.776445105197793),
    ADAPTIVE_CONFIDENCE: (
        31.82051595377396,
        6.964556734283271,
        4.540702858568132,
        3.746947387979197,
        3.3649299989072183,
    ),
}

_HIGHER = frozenset(
    {"output_tokens_per_s", "requests_per_s", "goodput_per_s", "slo_attainment", "slot_utilization", "kv_utilization"}
    | {"acceptance_rate", "tokens_per_step", "prefix_hit_rate_observed", "mfu", "mbu", "top1_agreement"}
)
_LOWER = frozenset(
    {"kv_waste", "peak_memory_bytes", "weights_bytes", "startup_s", "ready_s", "energy_j_per_output_token"}
    | {"cost_per_million_output_tokens", "perplexity", "kl_vs_bf16", "kv_transfer_bytes", "kv_transfer_s"}
    | {"ttft_s", "itl_s", "inter_emission_s", "tpot_s", "e2e_s", "normalized_latency_s", "queueing_s"}
    | {"ttft_urgent_s"}
)


@dataclass(frozen=True)
class Ratio:
    """arm / reference. ``median`` None: not comparable, or no pair (n = 0); ``low``, ``high`` None: fewer than two."""

    median: float | None
    low: float | None
    high: float | None
    n: int
    verdict: str


def direction(metric: str) -> int:
    """+1 if more is better, -1 if less is, 0 for what is neither (counts, shares of the traffic)."""
    name, _, part = metric.partition(".")
    if part == "n":
        return 0
    return 1 if name in _HIGHER else -1 if name in _LOWER else 0


def paired_log_ratios(arm: Mapping[int, float | None], reference: Mapping[int, float | None]) -> list[float]:
    """log(arm / reference) of each trial that both have; a pair with a null, 0 or inf (or below 0) is left out."""
    logs = []
    for trial in sorted(arm.keys() & reference.keys()):
        ours, theirs = arm[trial], reference[trial]
        if ours is not None and theirs is not None and 0 < ours < math.inf and 0 < theirs < math.inf:
            logs.append(math.log(ours) - math.log(theirs))
    return logs


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """An interval for the centre of ``values``; None for fewer than two.

    The narrowest symmetric order-statistic interval [x(k), x(n+1-k)] that covers the median with ``confidence``; where
    n is too small for one, the t interval of the mean. Both contain the sample median. ``confidence``: .95 or .98.
    """
    n = len(values)
    if n < 2:
        return None
    ordered = sorted(values)
    k = order_statistic_rank(n, confidence)
    if k > 0:
        return ordered[k - 1], ordered[n - k]
    mean = math.fsum(values) / n
    half = T_QUANTILES[confidence][n - 2] * stdev(values) / math.sqrt(n)
    # |mean - median| is at most s * sqrt((n - 1) / n), below the half-width for every n here: min and max only undo
    # the last bit of rounding when all values agree.
    centre = median(values)
    return min(mean - half, centre), max(mean + half, centre)


def order_statistic_rank(n: int, confidence: float) -> int:
    """The largest k with P(x(k) <= median <= x(n+1-k)) = 1 - 2 P(Bin(n, 1/2) < k) >= confidence; 0 if there is none."""
    k, below = 0, 0
    while k < n // 2:
        below += math.comb(n, k)  # the outcomes with at most k of n values under the median
        if 1 - below / 2 ** (n - 1) < confidence:
            break
        k += 1
    return k


def verdict(metric: str, low: float | None, high: float | None) -> str:
    """In the metric's good direction. ``low`` and ``high`` bound the ratio; None: no interval, which shows nothing."""
    good = direction(metric)
    if low is None or high is None or good == 0 or low <= 1 <= high:
        return "no difference shown"
    return "better" if (low > 1) == (good > 0) else "worse"


def _exp(value: float) -> float:
    """inf where math.exp would overflow: two pairs that disagree wildly."""
    return math.exp(value) if value < 709 else math.inf


def ratio(
    metric: str,
    arm: Mapping[int, float | None],
    reference: Mapping[int, float | None],
    *,
    comparable: bool = True,
    adaptive: bool = False,
) -> Ratio:
    """The ratio of two arms' values by trial number. ``adaptive``: the study stops by its own interval.

    comparable: whether machine, model and traffic are the same and no speed is emulated. Where they are and no pair is
    left, nothing was shown: that is no verdict on the conditions.
    """
    logs = paired_log_ratios(arm, reference)
    if not comparable:
        return Ratio(None, None, None, len(logs), "not comparable")
    if not logs:
        return Ratio(None, None, None, 0, verdict(metric, None, None))
    bounds = interval(logs, ADAPTIVE_CONFIDENCE if adaptive else CONFIDENCE)
    low, high = (None, None) if bounds is None else (_exp(bounds[0]), _exp(bounds[1]))
    return Ratio(_exp(median(logs)), low, high, len(logs), verdict(metric, low, high))
