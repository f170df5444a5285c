"""Speculation: the decode speed-up that a trial's own figures predict, and the rate at which it did decode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# Of `steps.parquet`, of the steps that decode and prefill nothing.
StepColumns = Mapping[str, Floats]


@dataclass(frozen=True)
class Prediction:
    """One trial's, or the medians of an arm's. None where a record lacks what a figure needs.

    drafting: of the sequences that a step decodes, the share whose drafts it verifies. accepted: tokens accepted in
    such a step of such a sequence. verify, propose: the forward passes that were run, and the drafting, in forward
    passes of the same sequences without drafts.
    """

    drafting: float | None
    accepted: float | None
    verify: float | None
    propose: float | None
    speedup: float | None


def predict(steps: StepColumns, decode_costs: Iterable[Mapping[str, Any]]) -> Prediction:
    """From accepted tokens and from what warm-up says that as many rows cost; the steps' own times are not used."""
    decoded, drafts = steps["decode_tokens"], steps["draft_tokens"]
    drafted = float(steps["drafting_sequences"].sum())
    if not drafted > 0:
        return Prediction(None, None, None, None, None)
    d, m = drafted / float(decoded.sum()), float(steps["accepted_tokens"].sum()) / drafted
    costs = sorted({int(cost["rows"]): float(cost["forward_s"]) for cost in decode_costs}.items())
    if len(costs) < 2 or min(seconds for _, seconds in costs) <= 0:
        return Prediction(d, m, None, None, None)
    rows, seconds = zip(*costs, strict=True)
    plain = float(np.interp(decoded, rows, seconds).sum())
    v, c = float(np.interp(decoded + drafts, rows, seconds).sum()) / plain, float(steps["propose_s"].sum()) / plain
    return Prediction(d, m, v, c, (1 + d * m) / (v + c))


def decode_rate(steps: StepColumns) -> float | None:
    """Tokens a second that a sequence gets."""
    decoded = steps["decode_tokens"]
    spent = float((decoded * (steps["end_s"] - steps["start_s"])).sum())
    return float((decoded + steps["accepted_tokens"]).sum()) / spent if spent > 0 else None
