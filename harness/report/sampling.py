"""Fewer points for the same picture: extremes and tails stay, and the caption says how many are shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

TAIL = 100  # of a distribution: its slowest values are what a reader looks for


def extremes(series: Sequence[Floats], limit: int) -> Indices:
    """Indices, ascending, that keep each series' minimum and maximum within every bucket, and both ends.

    All series have one length and share the indices, as stacked areas need. At most about ``limit`` are returned.
    """
    length = len(series[0]) if series else 0
    if length <= limit:
        return np.arange(length)
    buckets = max(1, limit // (2 * len(series)))
    edges = np.linspace(0, length, buckets + 1).astype(int)
    kept = {0, length - 1}
    for start, end in pairwise(edges.tolist()):
        for values in series:
            part = np.nan_to_num(values[start:end], nan=0.0)
            kept.update((start + int(part.argmin()), start + int(part.argmax())))
    return np.array(sorted(kept), np.int64)


def ranks(count: int, limit: int) -> Indices:
    """Indices of an ascending sample that draw its distribution: evenly spaced ranks and the whole tail."""
    if count <= limit:
        return np.arange(count)
    tail = min(TAIL, limit // 2)
    even = np.linspace(0, count - 1, limit - tail).round().astype(np.int64)
    return np.unique(np.concatenate([even, np.arange(count - tail, count)]))
