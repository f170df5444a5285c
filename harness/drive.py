"""Feeds a request stream to a target and records what comes back. Open and closed loop; real and virtual clock."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable

from harness.recorder import Recorder
from impls.request import Request
from impls.seams import StepResult, Target
from workloads.stream import RequestStream

LOOK_S = 0.5  # how long the driver waits at a stretch


class RealClock:
    """Monotonic seconds since the run's start. The last millisecond of a wait is spun: a sleep may oversleep by one."""

    def __init__(self) -> None:
        self.restart()

    def restart(self, lead_s: float = 0.0) -> None:
        """It shows -``lead_s`` now."""
        self._origin = time.perf_counter() + lead_s

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def sleep_until(self, deadline_s: float) -> None:
        while (left := deadline_s - self.now()) > 0:
            if left > 0.001:
                time.sleep(min(left - 0.0005, 0.5))


class VirtualClock:
    """Time that passes only where something says that it does."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def sleep_until(self, deadline_s: float) -> None:
        if math.isinf(deadline_s):
            raise RuntimeError("nothing can run and nothing will arrive: the target waits for ever")
        self._now = max(self._now, deadline_s)


def drive(
    target: Target,
    stream: RequestStream,
    recorder: Recorder,
    clock: RealClock | VirtualClock,
    *,
    initial: list[Request],
    on_step: Callable[[StepResult], None] = lambda result: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Submit each request (its samples) at its intended arrival and step the target until all have ended; what follows
    from a request's end follows from that of its last sample. True if it ran to its end.

    ``initial`` is ``stream.initial()``, called before the clock starts: building prompts is no part of the run. Pacing
    is by absolute deadlines, so a late step delays what follows it but never the schedule itself. `on_step` is called
    while nothing has arrived as well. On `should_stop`, which is asked at least every `LOOK_S` by the real clock, the
    requests that are still open are aborted and recorded as such.
    """
    pending: list[tuple[float, int, Request]] = []
    order = 0

    def push(requests: list[Request]) -> None:
        nonlocal order
        for request in requests:
            heapq.heappush(pending, (request.arrival_s, order, request))
            order += 1

    push(initial)
    open_requests: dict[str, Request] = {}  # by the id of each of their samples that has not ended
    num_open: Counter[str] = Counter()  # of a request: so many samples
    outputs: dict[str, list[int]] = {}
    while pending or open_requests or target.has_work:
        if should_stop():
            for request_id in open_requests:
                target.abort(request_id)
                recorder.aborted(request_id, clock.now())
            return False
        now = clock.now()
        while pending and pending[0][0] <= now:
            request = heapq.heappop(pending)[2]
            for sample in request.samples():
                open_requests[sample.request_id] = request
                num_open[request.request_id] += 1
                outputs[sample.request_id] = []
                target.add_request(sample)
                recorder.submitted(sample, clock.now())
        until = pending[0][0] if pending else math.inf
        if isinstance(clock, RealClock):
            until = min(until, now + LOOK_S)
        if not target.has_work:
            clock.sleep_until(until)
            on_step(StepResult())
            continue
        result = target.step(until)
        recorder.step(result)
        if result.stats is not None or result.emissions:  # else it waits, and one that waits for ever is a hang
            on_step(result)
        for emission in result.emissions:
            outputs[emission.request_id] += emission.token_ids
            if emission.finish_reason is not None:
                request, output = open_requests.pop(emission.request_id), outputs.pop(emission.request_id)
                num_open[request.request_id] -= 1
                if not num_open[request.request_id]:
                    push(stream.on_finish(request, emission.time_s, output))
    return True
