"""How many tokens a prompt or an output has. Each law draws whole numbers of at least 1; the first n of a longer
sample are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from workloads.options import require

Lengths = NDArray[np.int64]

# More than any context window; an option or a trace row above it is a mistake, not a request.
MAX_TOKENS = 10_000_000


class LengthLaw(Protocol):
    """How many tokens prompts or outputs have."""

    def sample(self, rng: Generator, n: int) -> Lengths:
        """int64 [n], tokens, each in 1..MAX_TOKENS."""


def _check(field: str, value: float) -> None:
    require(1 <= value <= MAX_TOKENS, field, value, f"from 1 to {MAX_TOKENS}")


@dataclass(frozen=True)
class Constant:
    """Always ``value`` tokens."""

    value: int

    def __post_init__(self) -> None:
        _check("value", self.value)

    def sample(self, rng: Generator, n: int) -> Lengths:
        return np.full(n, self.value, dtype=np.int64)


@dataclass(frozen=True)
class Uniform:
    """Whole numbers ``low``..``high``, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check("low", self.low)
        _check("high", self.high)
        require(self.low <= self.high, "high", self.high, f"at least low={self.low}")

    def sample(self, rng: Generator, n: int) -> Lengths:
        return (self.low + rng.random(n) * (self.high - self.low + 1)).astype(np.int64)


@dataclass(frozen=True)
class CappedExponential:
    """Exponential of ``mean``, rounded, drawn again outside 1..``cap`` (rejection, as in Anyscale's 2023 benchmark; not
    clipped, so no heap of samples at the cap). Drawn here by the inverse of that truncated distribution.
    """

    mean: float
    cap: int

    def __post_init__(self) -> None:
        _check("mean", self.mean)
        _check("cap", self.cap)

    def sample(self, rng: Generator, n: int) -> Lengths:
        low, high = -math.expm1(-0.5 / self.mean), -math.expm1(-(self.cap + 0.5) / self.mean)
        drawn = np.rint(-self.mean * np.log1p(-(low + rng.random(n) * (high - low))))
        return np.clip(drawn, 1, self.cap).astype(np.int64)  # the very edges of the interval round outwards


@dataclass(frozen=True)
class LognormalMixture:
    """Lognormal parts (``weights``; ``mu``, ``sigma`` of the logarithm), rounded and clipped to ``low``..``high``."""

    mu: tuple[float, ...]
    sigma: tuple[float, ...]
    weights: tuple[float, ...] = (1.0,)
    low: int = 1
    high: int = MAX_TOKENS

    def __post_init__(self) -> None:
        require(len(self.mu) > 0, "mu", list(self.mu), "a list with one number a component")
        for name, values in (("sigma", self.sigma), ("weights", self.weights)):
            require(len(values) == len(self.mu), name, list(values), f"as long as mu ({len(self.mu)})")
        require(all(-50 <= mu <= 50 for mu in self.mu), "mu", list(self.mu), "from -50 to 50")
        require(all(0 <= sigma <= 10 for sigma in self.sigma), "sigma", list(self.sigma), "from 0 to 10")
        require(
            min(self.weights) >= 0 and sum(self.weights) > 0, "weights", list(self.weights), "at least 0, not all 0"
        )
        _check("low", self.low)
        _check("high", self.high)
        require(self.low <= self.high, "high", self.high, f"at least low={self.low}")

    def sample(self, rng: Generator, n: int) -> Lengths:
        which_rng, normal_rng = rng.spawn(2)
        bounds = np.cumsum(self.weights) / sum(self.weights)
        which = np.minimum(np.searchsorted(bounds, which_rng.random(n), side="right"), len(self.mu) - 1)
        drawn = np.exp(np.array(self.mu)[which] + np.array(self.sigma)[which] * normal_rng.standard_normal(n))
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Empirical:
    """Quantiles as published: ``values`` at ``probabilities`` (0 first, 1 last), straight lines between them. Equal
    neighbouring values are an atom.
    """

    probabilities: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        p, v = self.probabilities, self.values
        require(len(p) >= 2 and p[0] == 0 and p[-1] == 1, "probabilities", list(p), "a list from 0 to 1")
        require(all(a < b for a, b in pairwise(p)), "probabilities", list(p), "increasing")
        require(len(v) == len(p), "values", list(v), f"as long as probabilities ({len(p)})")
        require(all(a <= b for a, b in pairwise(v)), "values", list(v), "non-decreasing")
        _check("values", v[0])
        _check("values", v[-1])

    def sample(self, rng: Generator, n: int) -> Lengths:
        return np.rint(np.interp(rng.random(n), self.probabilities, self.values)).astype(np.int64)


LENGTHS: dict[str, type[LengthLaw]] = {
    "constant": Constant,
    "uniform": Uniform,
    "capped_exponential": CappedExponential,
    "lognormal": LognormalMixture,
    "empirical": Empirical,
}
