"""Running requests outside the measured window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from impls.engine import Engine
from impls.request import Request
from impls.seams import StepResult, StepStats, Target

Tick = Callable[[], None]


def run_to_end(target: Target, requests: Sequence[Request], tick: Tick) -> Iterator[StepResult]:
    """Run these requests, step by step, to their ends; ``tick`` after each, for whoever watches for a hang."""
    for request in requests:
        target.add_request(request)
    while target.has_work:
        result = target.step(math.inf)
        tick()
        yield result


def run_steps(engine: Engine, requests: Sequence[Request], tick: Tick) -> Iterator[StepStats]:
    """What `run_to_end` says of each step."""
    return (result.stats for result in run_to_end(engine, requests, tick) if result.stats is not None)
