"""Running requests outside the measured window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from impls.engine import Engine
from impls.request import Request
from impls.seams import StepStats

Tick = Callable[[], None]


def run_steps(engine: Engine, requests: Sequence[Request], tick: Tick) -> Iterator[StepStats]:
    """Run these requests, step by step, to their ends; ``tick`` after each, for whoever watches for a hang."""
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        stats = engine.step(math.inf).stats
        tick()
        if stats is not None:
            yield stats
