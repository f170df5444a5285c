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
    def read(self) -> Sequence[Reading]: ...


@dataclass(frozen=True)
class Cost:
    """What the sampling itself took: CPU seconds of its thread, and how many rounds."""

    cpu_s: float
    rounds: int


class Sampler:
    """Reads every source ``rate_hz`` times a second between `start` and `stop`; once at either end as well."""

    def __init__(self, sources: Sequence[Source], clock: Clock, rate_hz: float = 10.0) -> None:
        if not rate_hz > 0:
            raise ValueError(f"telemetry.rate_hz={rate_hz} must be above 0")
        self._sources, self._clock, self._period = list(sources), clock, 1.0 / rate_hz
        self._rows: list[tuple[float, Reading]] = []
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self.cost = Cost(0.0, 0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> pd.DataFrame:
        """End sampling; columns t_s, source, name, value, unit. Fields that were never answered are left out."""
        self._halt.set()
        self._thread.join()
        answered = {(r.source, r.name) for _, r in self._rows if r.value is not None}
        rows = [(t, *r) for t, r in self._rows if (r.source, r.name) in answered]
        return pd.DataFrame(rows, columns=["t_s", "source", "name", "value", "unit"])

    def _run(self) -> None:
        begun, rounds = time.thread_time(), 0
        while True:
            last = self._halt.wait(0 if rounds == 0 else self._period)
            now = self._clock.now()
            for source in self._sources:
                self._rows += [(now, reading) for reading in source.read()]
            rounds += 1
            self.cost = Cost(time.thread_time() - begun, rounds)
            if last:
                return
