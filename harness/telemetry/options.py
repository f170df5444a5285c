"""What conf/telemetry declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TelemetryOptions:
    """rate_hz: rounds of readings per second. profiler_steps, profiler_at: how many steps of the window are run again
    under the profiler, and where it is to look for them (0: the window's start, 1: its end).
    """

    rate_hz: float
    profiler: Literal["none", "torch"]
    profiler_steps: int
    profiler_at: float
