"""When requests arrive. Each law gives intended arrival times; the first n of a longer sample are the same.

``rate`` is always the mean number of arrivals per second over all time. The random laws are processes that start at
t = 0: the first arrival comes after the first gap, so n arrivals in [0, t_n] estimate the rate without bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from workloads.options import require

Times = NDArray[np.float64]

# Beyond these an option is a mistake, and arithmetic with it overflows or never ends.
MIN_RATE, MAX_RATE = 1e-6, 1e9  # requests per second: one in twelve days
MIN_S, MAX_S = 1e-3, 1e9
MIN_CV, MAX_CV = 1e-3, 100.0
MAX_RELATIVE = 1e9


class ArrivalLaw(Protocol):
    """When requests are meant to come."""

    def sample(self, rng: Generator, n: int) -> Times:
        """float64 [n]: intended arrivals, seconds since the run's start, non-decreasing."""


def _check_rate(rate: float) -> None:
    require(MIN_RATE <= rate <= MAX_RATE, "rate", rate, f"from {MIN_RATE:g} to {MAX_RATE:g} (requests per second)")


def _check_seconds(field: str, value: float) -> None:
    require(MIN_S <= value <= MAX_S, field, value, f"from {MIN_S:g} to {MAX_S:g} (seconds)")


def _check_cv(cv: float) -> None:
    require(cv == 0 or MIN_CV <= cv <= MAX_CV, "cv", cv, f"0 or from {MIN_CV:g} to {MAX_CV:g}")


def _gamma_gaps(rng: Generator, n: int, rate: float, cv: float) -> Times:
    """Renewal gaps with mean 1/rate and coefficient of variation cv: gamma of shape 1/cv^2 (cv 0: constant)."""
    if cv == 0:
        return np.full(n, 1.0 / rate)
    return rng.standard_gamma(1.0 / cv**2, size=n) * (cv**2 / rate)


@dataclass(frozen=True)
class Burst:
    """All at once, at t = 0: what is measured is the engine's throughput, not its response to load."""

    def sample(self, rng: Generator, n: int) -> Times:
        return np.zeros(n)


@dataclass(frozen=True)
class Constant:
    """One every 1/``rate`` seconds; ``rate`` in requests a second."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def sample(self, rng: Generator, n: int) -> Times:
        return np.arange(1, n + 1) / self.rate


@dataclass(frozen=True)
class Poisson:
    """Independent exponential gaps of mean 1/``rate``; ``rate`` in requests a second."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def sample(self, rng: Generator, n: int) -> Times:
        return np.cumsum(rng.standard_exponential(n)) / self.rate


@dataclass(frozen=True)
class Gamma:
    """Renewal process with gamma gaps; ``cv`` 1 is Poisson, above is burstier (vLLM's burstiness is 1/cv^2)."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        require(MIN_CV <= self.cv <= MAX_CV, "cv", self.cv, f"from {MIN_CV:g} to {MAX_CV:g}")

    def sample(self, rng: Generator, n: int) -> Times:
        return np.cumsum(_gamma_gaps(rng, n, self.rate, self.cv))


@dataclass(frozen=True)
class OnOff:
    """Bursts and silence: on periods exponential (mean ``on_s``), off periods ``off_min_s`` plus exponential (mean
    ``off_s`` in all), gamma gaps of ``cv`` inside the on time. ``rate`` is the mean over both, so inside the on time
    it is rate * (on_s + off_s) / on_s. Starts in the on state.
    """

    rate: float
    on_s: float
    off_s: float
    off_min_s: float = 0.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_seconds("on_s", self.on_s)
        _check_seconds("off_s", self.off_s)
        require(0 <= self.off_min_s <= self.off_s, "off_min_s", self.off_min_s, f"from 0 to off_s={self.off_s}")
        _check_cv(self.cv)

    def sample(self, rng: Generator, n: int) -> Times:
        gaps_rng, ends_rng, off_rng = rng.spawn(3)
        gaps = _gamma_gaps(gaps_rng, n, self.rate * (self.on_s + self.off_s) / self.on_s, self.cv)
        # In on time, on periods end as a Poisson process; the silences that fall into a gap add up to a gamma variable.
        # However many on periods pass without an arrival, n draws of each do.
        silences = ends_rng.poisson(gaps / self.on_s)
        off = silences * self.off_min_s + off_rng.standard_gamma(silences) * (self.off_s - self.off_min_s)
        times: Times = np.cumsum(gaps + off)
        return times


@dataclass(frozen=True)
class Piecewise:
    """A rate that changes in steps, repeated for ever: ``segments`` are [duration in s, relative rate]; scaled so that
    the mean over a cycle is ``rate``. Gaps in rescaled time are gamma of ``cv`` (1: inhomogeneous Poisson).
    """

    rate: float
    segments: tuple[tuple[float, float], ...]
    cv: float = 1.0

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        require(len(self.segments) > 0, "segments", list(self.segments), "a list of [duration_s, relative rate]")
        shown = list(self.segments)
        allowed = f"durations from {MIN_S:g} to {MAX_S:g} (seconds)"
        require(all(MIN_S <= d <= MAX_S for d, _ in self.segments), "segments", shown, allowed)
        allowed = f"relative rates of 0 or from {1 / MAX_RELATIVE:g} to {MAX_RELATIVE:g}"
        rates = [r for _, r in self.segments if r != 0]
        require(all(1 / MAX_RELATIVE <= r <= MAX_RELATIVE for r in rates), "segments", shown, allowed)
        require(len(rates) > 0, "segments", shown, "somewhere above 0 in rate")
        _check_cv(self.cv)

    def sample(self, rng: Generator, n: int) -> Times:
        durations, relative = np.array(self.segments).T
        rates = relative * (self.rate * durations.sum() / (durations @ relative))
        edges = np.concatenate(([0.0], np.cumsum(durations)))
        expected = np.concatenate(([0.0], np.cumsum(durations * rates)))  # arrivals expected by each edge
        cycles, rest = np.divmod(np.cumsum(_gamma_gaps(rng, n, 1.0, self.cv)), expected[-1])
        # side=right lands past a segment of rate 0, whose two edges expect the same number of arrivals.
        segment = np.minimum(np.searchsorted(expected, rest, side="right") - 1, len(rates) - 1)
        times: Times = cycles * edges[-1] + edges[segment] + (rest - expected[segment]) / rates[segment]
        return times


@dataclass(frozen=True)
class ClosedLoop:
    """``concurrency`` clients, each sending its next request when its last one has finished (for `sessions`: its next
    session). Arrivals depend on the system measured, so an overloaded system is asked for less.
    """

    concurrency: int

    def __post_init__(self) -> None:
        require(1 <= self.concurrency <= 1_000_000, "concurrency", self.concurrency, "from 1 to 1000000")

    def sample(self, rng: Generator, n: int) -> Times:
        """The first ``concurrency`` arrivals, at t = 0; the others follow finishes."""
        return np.zeros(min(n, self.concurrency))


ARRIVALS: dict[str, type[ArrivalLaw]] = {
    "burst": Burst,
    "constant": Constant,
    "poisson": Poisson,
    "gamma": Gamma,
    "onoff": OnOff,
    "piecewise": Piecewise,
    "closed_loop": ClosedLoop,
}


def index_of_dispersion(times: Times, window_s: float) -> float | None:
    """Variance over mean of the arrivals counted in whole windows (Poisson: 1). None below two windows."""
    windows = float(times[-1] // window_s) if times.size else 0.0
    if windows < 2:
        return None
    seen = times[times <= windows * window_s]
    # Only windows with an arrival are held: at a low rate the empty ones between them would not fit in memory.
    counts = np.unique(np.minimum(seen // window_s, windows - 1), return_counts=True)[1].astype(float)
    mean = float(counts.sum()) / windows
    return (float((counts**2).sum()) / windows - mean**2) / mean if mean > 0 else None
