"""The speed-up of speculative decoding that a trial's own figures predict, and from which batch on it is none.

Leviathan, Kalman, Matias (ICML 2023): (1 - a^(g+1)) / ((1 - a)(g c + 1)), for g drafts a step, each of which stands
with probability a if those before it did, and c what drafting one takes, in target steps. Their 1 holds where a step of
g + 1 rows takes as long as one of 1 row; here it is v = T(rows with drafts) / T(rows without), as measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

FIELDS = (
    *("drafting_share", "draft_length", "conditional_acceptance", "draft_cost", "verify_cost", "predicted_speedup"),
)


def expected_accepted(a: float, g: float) -> float:
    """Tokens accepted of g drafts: a + a^2 + ... + a^g, the mean of a geometric law cut off at g."""
    if a <= 0:
        return 0.0
    return g if a >= 1 else -a * math.expm1(g * math.log(a)) / (1 - a)


def conditional_acceptance(accepted: float, g: float) -> float | None:
    """The a for which ``accepted`` tokens of g drafts are expected; None without drafts.

    Not the acceptance rate, accepted / drafted: that counts drafts behind a rejected one, which no one has judged, as
    rejected, and falls with g even if a does not.
    """
    if g <= 0 or not 0 <= accepted <= g * (1 + 1e-9):
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # expected_accepted rises with a
        middle = (low + high) / 2
        low, high = (middle, high) if expected_accepted(middle, g) < accepted else (low, middle)
    return high


def predicted_speedup(a: float, g: float, c: float, v: float, share: float = 1.0) -> float:
    """Of decoding over decoding without drafts. ``share``: of the steps of a sequence, those with drafts; of the rest
    each gives one token. c and v are means over all of them."""
    return (1 + share * expected_accepted(a, g)) / (share * g * c + v)


def speculation_metrics(
    steps: pd.DataFrame, decode_costs: Iterable[Mapping[str, Any]] | None
) -> dict[str, float | None]:
    """`FIELDS` of one trial, from its steps that decode and prefill nothing; null where nothing was drafted or timed.

    drafting_share, draft_length: share of a decoding sequence's steps that verify drafts of its, and drafts in such a
    step. draft_cost: time to draft one token for each sequence, in forward passes over the same sequences without
    drafts; verify_cost: the forward passes over all rows, in the same unit. Forward passes are those that
    ``decode_costs`` has timed, between its rows in a straight line: the steps' own times are not used.
    """
    found: dict[str, float | None] = dict.fromkeys(FIELDS)
    names = ("decode_tokens", "draft_tokens", "accepted_tokens", "drafting_sequences", "propose_s")
    seen = steps[((steps["prefill_tokens"] == 0) & (steps["decode_tokens"] > 0)).to_numpy(bool)]
    decoded, drafts, accepted, drafting, propose_s = (seen[name].to_numpy(float, na_value=0.0) for name in names)
    sequence_steps = float(drafting.sum())
    if not sequence_steps:
        return found
    share, length = sequence_steps / float(decoded.sum()), float(drafts.sum()) / sequence_steps
    a = conditional_acceptance(float(accepted.sum()) / sequence_steps, length)
    found |= {"drafting_share": share, "draft_length": length, "conditional_acceptance": a}
    costs = sorted({int(cost["rows"]): float(cost["forward_s"]) for cost in decode_costs or ()}.items())
    if a is None or len(costs) < 2 or min(seconds for _, seconds in costs) <= 0:
        return found
    rows, seconds = zip(*costs, strict=True)
    plain = float(np.interp(decoded, rows, seconds).sum())
    v = float(np.interp(decoded + drafts, rows, seconds).sum()) / plain
    c = float(propose_s.sum()) / plain / (share * length)
    return found | {"draft_cost": c, "verify_cost": v, "predicted_speedup": predicted_speedup(a, length, c, v, share)}


def break_even_batch(speedups: Sequence[tuple[int, float]]) -> float | None:
    """The batch at which a speed-up falls to 1, on a straight line between the logarithms of two neighbours.

    speedups: (batch, ratio), batches ascending. None where it is not within the batches measured: above 1 in all of
    them, or below 1 from the first on.
    """
    for (batch, ratio), (next_batch, next_ratio) in pairwise(speedups):
        if ratio >= 1 > next_ratio:
            part = math.log(ratio) / (math.log(ratio) - math.log(next_ratio))
            return float(batch * (next_batch / batch) ** part)
    return None
