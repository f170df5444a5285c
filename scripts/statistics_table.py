"""Simulated proof of the intervals and verdicts: writes the tables of docs/statistics.md.

    python -m scripts.statistics_table

Two arms, run one after the other in the order that the harness plans. A trial's log speed is disturbed by one of the
laws below, in units of the *noise*, the standard deviation of one undisturbed trial. The interval of a sample moves
with the true difference and grows with the noise, so one set of samples serves every noise and every difference.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.adaptive import MIN_TRIALS
from harness.plan import PlannedArm, block_order
from harness.statistics import ADAPTIVE_CONFIDENCE, CONFIDENCE, T_QUANTILES, order_statistic_rank

Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator], Array]

PAGE = Path(__file__).parents[1] / "docs" / "statistics.md"
BEGIN, END = "<!-- begin: python -m scripts.statistics_table -->", "<!-- end -->"
SEED = 20
STUDIES = 20_000  # simulated studies a law: a share of 95 % is known to 0.15 points (one standard error)
TRIALS = (3, 5, 9)
HALF_WIDTH, MAX_TRIALS = 0.03, 20
NOISES = (0.02, 0.05, 0.10)
NOISES_TRIED = (*NOISES, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.0175, 0.025, 0.03, 0.035, 0.04, 0.07)
DIFFERENCES = (0.05, 0.10, 0.20)
REQUIRED = 0.94
SHAPE = (STUDIES, MAX_TRIALS, 2)  # the last axis: the first and the second trial of a block


@dataclass(frozen=True)
class Law:
    """``draw``: log speeds by run order, `SHAPE`. ``arm_alone``: what only the arm suffers, by study and block."""

    name: str
    draw: Draw
    arm_alone: Draw | None = None


def normal(rng: np.random.Generator) -> Array:
    return rng.standard_normal(SHAPE)


def wandering(rng: np.random.Generator) -> Array:
    """The machine's speed is a random walk: from one trial to the next it moves by as much as the noise."""
    steps = rng.standard_normal((STUDIES, 2 * MAX_TRIALS))
    return normal(rng) + np.cumsum(steps, axis=1).reshape(SHAPE)


def lasting(rng: np.random.Generator) -> Array:
    """Neighbouring trials share half of their noise (AR(1), 0.5)."""
    fresh = rng.standard_normal((STUDIES, 2 * MAX_TRIALS))
    levels = fresh.copy()
    for i in range(1, levels.shape[1]):
        levels[:, i] = 0.5 * levels[:, i - 1] + math.sqrt(0.75) * fresh[:, i]
    return levels.reshape(SHAPE)


def slowing(rng: np.random.Generator, step: float) -> Array:
    """Each trial is slower than the one before it by ``step`` times the noise."""
    return normal(rng) - step * np.arange(2.0 * MAX_TRIALS).reshape(SHAPE[1:])


def heavy_tails(rng: np.random.Generator) -> Array:
    """Student's t with 3 degrees of freedom, scaled to the same standard deviation."""
    return rng.standard_t(3, SHAPE) / math.sqrt(3)


def interrupted(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """One trial in ten is slowed, by 5 times the noise on average (exponential)."""
    return -5 * rng.standard_exponential(shape) * (rng.random(shape) < 0.1)


LASTING = Law("noise that lasts", lasting)
SLOWING = Law("machine slows steadily", partial(slowing, step=1.0))
SLOWING_MUCH = Law("machine slows steadily, 3 x noise a trial", partial(slowing, step=3.0))
LAWS = (
    Law("normal noise", normal),
    Law("machine's speed wanders", wandering),
    LASTING,
    SLOWING,
    SLOWING_MUCH,
    Law("heavy tails", heavy_tails),
    Law("busy host", lambda rng: normal(rng) + interrupted(rng, SHAPE)),
    Law("busy host, one arm alone hit", normal, partial(interrupted, shape=SHAPE[:2])),
)


@dataclass(frozen=True)
class Bounds:
    """Intervals of `STUDIES` studies and the ``truth`` that each claims to hold, all in units of the noise."""

    low: Array
    high: Array
    truth: Array

    def coverage(self) -> float:
        return float(((self.low <= self.truth) & (self.truth <= self.high)).mean())

    def power(self, noise: float, difference: float) -> float:
        """The share of verdicts *better* when the arm is faster by ``difference``."""
        return float((self.low * noise + math.log1p(difference) > 0).mean())


class Simulation:
    """One law's studies: log ratios of pairs, and the intervals after each number of trials."""

    def __init__(self, law: Law, *, shuffled_anew: bool = False) -> None:
        rng = np.random.default_rng([SEED, LAWS.index(law)])
        levels = law.draw(rng)
        if shuffled_anew:
            arm_first = rng.random(SHAPE[:2]) < 0.5
        else:
            arm_first = planned_orders()[rng.integers(len(planned_orders()), size=STUDIES)]
        self.logs = np.where(arm_first, 1, -1) * (levels[..., 0] - levels[..., 1])
        self.mean = self.median = 0.0
        if law.arm_alone is not None:
            self.logs += law.arm_alone(rng)
            self.mean, self.median = -0.5, float(np.median(self.logs))  # one in ten of 5; the law's own median
        self.looks = {n: self.bounds(n, ADAPTIVE_CONFIDENCE) for n in range(MIN_TRIALS, MAX_TRIALS + 1)}

    def bounds(self, n: int, confidence: float = CONFIDENCE) -> Bounds:
        low, high = intervals(self.logs[:, :n], confidence)
        truth = self.median if order_statistic_rank(n, confidence) else self.mean
        return Bounds(low, high, np.full(STUDIES, truth))

    def adaptive(self, noise: float) -> tuple[Bounds, NDArray[np.int64]]:
        """What is reported where each study stops, and after how many trials it does (`harness.adaptive`)."""
        chosen, trials = self.looks[MAX_TRIALS], np.full(STUDIES, MAX_TRIALS)
        low, high, truth = chosen.low.copy(), chosen.high.copy(), chosen.truth.copy()
        for n in reversed(range(MIN_TRIALS, MAX_TRIALS)):  # the earliest look that is narrow enough wins
            look = self.looks[n]
            stop = (look.high - look.low) / 2 * noise <= HALF_WIDTH
            low[stop], high[stop], truth[stop], trials[stop] = look.low[stop], look.high[stop], look.truth[stop], n
        return Bounds(low, high, truth), trials


def intervals(logs: Array, confidence: float) -> tuple[Array, Array]:
    """`harness.statistics.interval` of every row at once."""
    n = logs.shape[1]
    k = order_statistic_rank(n, confidence)
    if k:
        ordered = np.sort(logs, axis=1)
        return ordered[:, k - 1], ordered[:, n - k]
    half = T_QUANTILES[confidence][n - 2] * logs.std(axis=1, ddof=1) / math.sqrt(n)
    mean = logs.mean(axis=1)
    return mean - half, mean + half


@cache
def planned_orders() -> NDArray[np.bool_]:
    """Does the arm run first? By seed and block, as the harness plans them, for 1,000 seeds."""
    arms = [PlannedArm(name, (), None, MAX_TRIALS) for name in ("arm", "reference")]
    return np.array([[block[0] == "arm" for block in block_order(arms, seed, MAX_TRIALS)] for seed in range(1000)])


def coverage_cells(simulation: Simulation) -> list[float]:
    """For 3, 5 and 9 trials; for the adaptive rule at each noise, and at the worst that was tried."""
    fixed = [simulation.bounds(n).coverage() for n in TRIALS]
    adaptive = [simulation.adaptive(noise)[0].coverage() for noise in NOISES_TRIED]
    return [*fixed, *adaptive[: len(NOISES)], min(adaptive)]


def tables() -> Iterator[str]:
    """The generated part of the page, line by line."""
    simulations = {law: Simulation(law) for law in LAWS}
    fixed = [f"n = {n}" for n in TRIALS]
    columns = [*fixed, *(f"adaptive, noise {noise:.0%}" for noise in NOISES), "at its worst noise"]
    yield "### Coverage, which is also the share of A/A studies that show no difference"
    yield ""
    yield from header("disturbance", *columns)
    for law, simulation in simulations.items():
        yield row(law.name, *map(share, coverage_cells(simulation)))
    yield ""
    yield "### Power: share of verdicts *better* at a true difference of 5 / 10 / 20 %"
    yield ""
    yield from header("disturbance", "noise", *fixed, "adaptive", "its trials (median)")
    for law, simulation in simulations.items():
        if law.arm_alone is None:
            for noise in NOISES:
                adaptive, trials = simulation.adaptive(noise)
                cells = [powers(bounds, noise) for bounds in (*map(simulation.bounds, TRIALS), adaptive)]
                yield row(law.name, f"{noise:.0%}", *cells, f"{np.median(trials):.0f}")
    yield ""
    yield "### The same coverage, were every block shuffled anew"
    yield ""
    yield from header("disturbance", *columns)
    for law in (LASTING, SLOWING, SLOWING_MUCH):
        yield row(law.name, *map(share, coverage_cells(Simulation(law, shuffled_anew=True))))


def share(value: float) -> str:
    return f"{value:.1%}" if value >= REQUIRED else f"**{value:.1%}**"


def powers(bounds: Bounds, noise: float) -> str:
    return " / ".join(f"{100 * bounds.power(noise, difference):.0f}" for difference in DIFFERENCES)


def header(*names: str) -> Iterator[str]:
    yield row(*names)
    yield row("---", *["---:"] * (len(names) - 1))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def page(text: str) -> str:
    """The page with its generated part made anew. ValueError if a marker is missing."""
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    return "\n".join([text[:before], "", *tables(), "", text[after:]])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
