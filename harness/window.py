"""The one interval of a trial that is measured, and what lies in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]

WINDOW_RULES = ("burst", "replay", "timed")


@dataclass(frozen=True)
class Window:
    """The one interval that every rate counts in, both ends included. None: it does not exist (nothing ran)."""

    rule: str
    start_s: float | None
    end_s: float | None

    @property
    def length_s(self) -> float | None:
        """None for a window that does not exist or is empty."""
        if self.start_s is None or self.end_s is None or self.end_s <= self.start_s:
            return None
        return self.end_s - self.start_s

    def holds(self, times: Floats) -> npt.NDArray[np.bool_]:
        """Of each of ``times`` (seconds), whether it lies inside; never, where there is no window."""
        if self.start_s is None or self.end_s is None:
            return np.zeros(len(times), bool)
        return (times >= self.start_s) & (times <= self.end_s)


def measure_window(requests: pd.DataFrame, rule: str, warmup_s: float, last_arrival_s: float) -> Window:
    """Burst and replay: first scheduled step to last token; timed: after the warm-up to the last intended arrival.

    A target whose steps are not seen begins with the first request that it is given.
    """
    if rule not in WINDOW_RULES:
        raise ValueError(f"window rule {rule!r}, allowed: {', '.join(WINDOW_RULES)}")
    if rule == "timed":
        return Window(rule, float(warmup_s), float(last_arrival_s))
    scheduled = requests["scheduled_s"].dropna()
    if scheduled.empty:
        scheduled = requests.loc[requests["finish_reason"] != "rejected", "submitted_s"]
    ends = [times[-1] for times in requests["emission_times_s"] if len(times)]
    if scheduled.empty or not ends:
        return Window(rule, None, None)
    return Window(rule, float(scheduled.min()), float(max(ends)))


def tokens_inside(requests: pd.DataFrame, window: Window) -> npt.NDArray[np.int64]:
    """Each request's tokens that were emitted inside the window, whether or not it ended there."""
    inside = [
        int(np.asarray(counts, int)[window.holds(np.asarray(times, float))].sum())
        for times, counts in zip(requests["emission_times_s"], requests["emission_tokens"], strict=True)
    ]
    return np.array(inside, np.int64)
