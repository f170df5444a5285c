"""The run's clock on another host, whose monotonic clock began at another time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from impls.seams import Clock

PINGS = 20


@dataclass(frozen=True)
class ShiftedClock:
    """Shows ``shift_s`` more than ``clock`` does on the host where it is read."""

    clock: Clock
    shift_s: float

    def now(self) -> float:
        return self.clock.now() + self.shift_s

    def sleep_until(self, deadline_s: float) -> None:
        self.clock.sleep_until(deadline_s - self.shift_s)


@dataclass(frozen=True)
class ClockDifference:
    """What another clock has to be given to show what ours does, and how far that may be wrong at most."""

    shift_s: float = 0.0
    error_s: float = 0.0


def compare(clock: Clock, ask: Callable[[], float]) -> ClockDifference:
    """``ask`` gives what the other clock shows, of which we know only that it was between asking and hearing. Of
    `PINGS` answers the one that was there soonest tells most (Cristian 1989)."""

    def once() -> ClockDifference:
        before = clock.now()
        there = ask()
        after = clock.now()
        return ClockDifference((before + after) / 2 - there, (after - before) / 2)

    return min((once() for _ in range(PINGS)), key=lambda difference: difference.error_s)
