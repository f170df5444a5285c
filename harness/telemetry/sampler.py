"""A thread that reads its sources at a fixed rate and knows what that cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import pandas as pd

from impls.seams import Clock


class Reading(NamedTuple):
    """One value of one source; ``value`` None where the device does not support it (never 0)."""

    source: str
    name: str
    value: float | None
    unit: str


class Source(Protocol):
    """Something that is read a few times a second, in the sampler's thread."""

    def read(self) -> Sequence[Reading]:
        """What can be read now; a field that is not renewed at every round may be left out of some."""
        ...

    def close(self) -> None:
        """Give back what the source holds; most hold nothing."""
        return


@dataclass(frozen=True)
class Cost:
    """What the sampling itself took, over ``rounds``: CPU seconds of its thread, and seconds that a round lasted.

    CPU seconds disturb (the interpreter's lock is held in them); the rest of a round waits for a driver.
    """

    cpu_s: float = 0.0
    rounds: int = 0
    mean_round_s: float = 0.0
    max_round_s: float = 0.0


class Sampler:
    """Reads every source ``rate_hz`` times a second between `start` and `stop`; once at either end as well.

    Rounds keep to a grid of absolute times; those that a slow source runs over are left out. The sampler owns its
    sources and closes them.
    """

    def __init__(self, sources: Sequence[Source], clock: Clock, rate_hz: float = 10.0) -> None:
        if not rate_hz > 0:
            raise ValueError(f"telemetry.rate_hz={rate_hz} must be above 0")
        self._sources, self._clock, self._period = list(sources), clock, 1.0 / rate_hz
        self._rows: list[tuple[float, Reading]] = []
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self.error: str | None = None  # why sampling ended before `stop`
        self.cost = Cost()

    def __enter__(self) -> Sampler:
        """Sampling ends with the block, however that ends; `stop` then gives what was read."""
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()

    def start(self) -> None:
        self._thread.start()

    def _end(self) -> None:
        if self._halt.is_set():
            return
        self._halt.set()
        self._thread.join()
        for source in self._sources:
            source.close()

    def stop(self) -> pd.DataFrame:
        """End sampling; columns t_s, source, name, value, unit. A field that was never answered has one row, null."""
        self._end()
        answered = {(r.source, r.name) for _, r in self._rows if r.value is not None}
        told: set[tuple[str, str]] = set()
        rows = []
        for t, reading in self._rows:
            field = (reading.source, reading.name)
            if field in answered or field not in told:
                told.add(field)
                rows.append((t, *reading))
        return pd.DataFrame(rows, columns=["t_s", "source", "name", "value", "unit"]).astype({"value": float})

    def _run(self) -> None:
        try:
            self._rounds()
        except Exception as error:  # whatever a source raises costs the readings after it, not the trial
            self.error = f"{type(error).__name__}: {error}"

    def _rounds(self) -> None:
        cpu_begun, begun = time.thread_time(), time.monotonic()
        rounds, spent, longest, due = 0, 0.0, 0.0, begun
        while True:
            last = self._halt.wait(max(0.0, due - time.monotonic()))
            entered = time.monotonic()
            now = self._clock.now()
            for source in self._sources:
                self._rows += [(now, reading) for reading in source.read()]
            rounds, took = rounds + 1, time.monotonic() - entered
            spent, longest = spent + took, max(longest, took)
            self.cost = Cost(time.thread_time() - cpu_begun, rounds, spent / rounds, longest)
            if last:
                return
            due += self._period * max(1, -(-(time.monotonic() - due) // self._period))
