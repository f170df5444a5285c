"""What each request waited for: its latencies, the gaps between its tokens, and whether it met an SLO.

``t0`` is the intended arrival; a failed request counts as +inf, so that losing the slowest requests cannot improve a
percentile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.window import Floats

# Per request, and so what an SLO may bound.
REQUEST_METRICS = ("ttft_s", "tpot_s", "e2e_s", "normalized_latency_s", "queueing_s")


def request_latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """`REQUEST_METRICS` of each request, NaN where undefined, and ``outcome``: finished, failed or rejected.

    A reply without a token is a failure, whatever reason it ended with. Failed ones are +inf, except in queueing.
    """
    columns = ("finish_reason", "intended_s", "scheduled_s", "emission_times_s", "emission_tokens")
    rows = [latencies_of(*row) for row in zip(*(requests[name] for name in columns), strict=True)]
    return pd.DataFrame(rows, columns=[*REQUEST_METRICS, "outcome"])


def latencies_of(
    reason: str | None, t0: float, scheduled: float, times: Sequence[float] | Floats, counts: Sequence[int] | Floats
) -> dict[str, Any]:
    """One request's, as in `request_latencies`; ``times`` and ``counts``: seconds and tokens of its emissions."""
    n = int(sum(counts))
    values: dict[str, Any] = dict.fromkeys(REQUEST_METRICS, math.nan)
    values["queueing_s"] = scheduled - t0
    if reason == "rejected":
        outcome = "rejected"
    elif reason not in ("length", "stop") or n == 0:
        outcome = "failed"
        values |= dict.fromkeys(("ttft_s", "tpot_s", "e2e_s", "normalized_latency_s"), math.inf)
    else:
        outcome = "finished"
        values["ttft_s"], values["e2e_s"] = times[0] - t0, times[-1] - t0
        values["normalized_latency_s"] = values["e2e_s"] / n
        if n > counts[0]:
            values["tpot_s"] = (times[-1] - times[0]) / (n - counts[0])
    return {**values, "outcome": outcome}


def emission_gaps(requests: pd.DataFrame | Mapping[str, Sequence[Any]]) -> tuple[Floats, Floats]:
    """(itl, inter_emission): k gaps of (t - t')/k for an emission of k tokens, and t - t'. The first gives none."""
    raw = [np.empty(0)] + [np.diff(np.asarray(times, float)) for times in requests["emission_times_s"]]
    later = [np.empty(0, int)] + [np.asarray(counts, int)[1:] for counts in requests["emission_tokens"]]
    gaps, tokens = np.concatenate(raw), np.concatenate(later)
    return np.repeat(gaps / tokens, tokens), gaps


def meets_slo(latencies: pd.DataFrame, slo: Mapping[str, float]) -> npt.NDArray[np.bool_]:
    """Finished, and at or under every bound; one that is undefined (TPOT of a single token) has nothing to miss."""
    good = (latencies["outcome"] == "finished").to_numpy()
    for name, bound in slo.items():
        if name not in REQUEST_METRICS:
            raise ValueError(f"slo.{name}: not a latency of a request, allowed: {', '.join(REQUEST_METRICS)}")
        good = good & ~(latencies[name].to_numpy(float) > bound)
    return np.asarray(good, bool)
