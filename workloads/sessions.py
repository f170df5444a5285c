"""Which requests belong to one conversation. A session's turns are consecutive requests of the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from workloads.arrivals import MAX_S
from workloads.errors import one_of
from workloads.options import require

HISTORIES = ("scripted", "generated")


@dataclass(frozen=True)
class SessionPlan:
    """``first``: int64 [num_sessions + 1], session s is requests first[s]..first[s + 1] - 1; ``think_s``: float64 [n],
    the pause before each turn (unused for the first); ``history``: what later turns quote, None where there are none.
    """

    first: NDArray[np.int64]
    think_s: NDArray[np.float64]
    history: str | None


class SessionLaw(Protocol):
    """Which requests are turns of one conversation."""

    def plan(self, rng: Generator, n: int) -> SessionPlan:
        """Of ``n`` requests, in the order of their numbers."""


@dataclass(frozen=True)
class SingleTurn:
    """Every request stands alone."""

    def plan(self, rng: Generator, n: int) -> SessionPlan:
        return SessionPlan(np.arange(n + 1), np.zeros(n), None)


@dataclass(frozen=True)
class MultiTurn:
    """Conversations of ``min_turns``..``max_turns`` turns (uniform). The arrival law starts sessions; a follow-up's
    intended arrival is the previous finish plus a think time (exponential, mean ``think_s``). A turn's prompt is the
    whole history and then as many new tokens as the prompt length law says.

    ``history`` scripted: the reply that a later turn quotes is the workload's own text, of the output length asked for,
    so every arm gets the same prompts. generated: it is what the arm really answered, so prompts may differ by arm.
    """

    min_turns: int
    max_turns: int
    think_s: float = 0.0
    history: str = "scripted"

    def __post_init__(self) -> None:
        require(1 <= self.min_turns <= 10_000, "min_turns", self.min_turns, "from 1 to 10000")
        require(
            self.min_turns <= self.max_turns <= 10_000,
            "max_turns",
            self.max_turns,
            f"from min_turns={self.min_turns} to 10000",
        )
        require(0 <= self.think_s <= MAX_S, "think_s", self.think_s, f"from 0 to {MAX_S:g} (seconds)")
        require(self.history in HISTORIES, "history", self.history, one_of(HISTORIES, self.history))

    def plan(self, rng: Generator, n: int) -> SessionPlan:
        turns_rng, think_rng = rng.spawn(2)
        turns = self.min_turns + (turns_rng.random(n) * (self.max_turns - self.min_turns + 1)).astype(np.int64)
        ends = np.cumsum(turns)
        ends = ends[: int(np.searchsorted(ends, n)) + 1].clip(max=n)  # the last session is cut at n requests
        return SessionPlan(np.concatenate(([0], ends)), think_rng.standard_exponential(n) * self.think_s, self.history)


SESSIONS: dict[str, type[SessionLaw]] = {"none": SingleTurn, "multi_turn": MultiTurn}
