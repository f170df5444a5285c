"""A target with a script: it emits known tokens at known times, so that every metric can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from harness.drive import VirtualClock, drive
from harness.recorder import Recorder
from impls.request import Request, SamplingParams
from impls.seams import Emission, KVReservation, StepResult, StepStats


class GoldenTarget:
    """Plays ``script`` in order; a result comes when the clock reaches its time: its step's end, or its emission."""

    def __init__(self, script: Sequence[StepResult], clock: VirtualClock) -> None:
        self._script, self._clock = list(script), clock
        self.requests: list[str] = []

    def add_request(self, request: Request) -> None:
        self.requests.append(request.request_id)

    def step(self, until: float) -> StepResult:
        result = self._script[0]
        due = result.emissions[0].time_s if result.stats is None else result.stats.end_s
        self._clock.sleep_until(min(due, until))
        return self._script.pop(0) if due <= until else StepResult()

    @property
    def has_work(self) -> bool:
        return bool(self._script)

    def abort(self, request_id: str) -> None:
        self._script.clear()

    def close(self) -> None:
        self._script.clear()


class FixedStream:
    """The requests as given; no session continues."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = list(requests)

    def initial(self) -> list[Request]:
        return self._requests

    def on_finish(self, request: Request, finished_s: float, output: list[int]) -> list[Request]:
        return []


def play(requests: Sequence[Request], script: Sequence[StepResult]) -> Recorder:
    """The recorder after the real driver has driven the script through."""
    clock, recorder = VirtualClock(), Recorder()
    target, stream = GoldenTarget(script, clock), FixedStream(requests)
    assert drive(target, stream, recorder, clock, initial=stream.initial())  # type: ignore[arg-type]
    return recorder


def request(request_id: str, prompt: int, max_tokens: int, arrival_s: float = 0.0, planned_cached: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(request_id, tuple(range(prompt)), sampling, arrival_s, planned_cached_tokens=planned_cached)


def contiguous_burst() -> tuple[list[Request], list[StepResult]]:
    """Static batching by hand: two slots of 16 positions, 40 positions of memory, three requests at 0, c waits.

    a: 4 in, 3 out; b: 2 in, 2 out (its row is dead in the third step); c: 3 in, 1 out.
    """
    requests = [request("a", 4, 3), request("b", 2, 2), request("c", 3, 1)]

    def step(start: float, end: float, live: list[str], rows: list[int], **more: object) -> StepStats:
        fixed = {"scheduled": live, "running": len(live), "query_lens": rows, "kv_lens": rows}
        return StepStats(start, end, kv_capacity_tokens=40, kv_allocation_unit=16, **{**fixed, **more})  # type: ignore[arg-type]

    script = [
        StepResult(
            [Emission("a", (10,), 1.0), Emission("b", (20,), 1.0)],
            step(
                *(0.0, 1.0, ["a", "b"], [4, 2]),
                waiting=1,
                prefill_tokens=6,
                slot_request_ids=["a", "b"],
                kv_free_tokens=8,
                kv_reservations=[KVReservation("a", 16, 4, False), KVReservation("b", 16, 2, False)],
            ),
        ),
        StepResult(
            [Emission("a", (11,), 1.5), Emission("b", (21,), 1.5, "length")],
            step(
                *(1.0, 1.5, ["a", "b"], [1, 1]),
                waiting=1,
                decode_tokens=2,
                slot_request_ids=["a", "b"],
                kv_free_tokens=8,
                kv_reservations=[KVReservation("a", 16, 5, False), KVReservation("b", 16, 3, False)],
            ),
        ),
        StepResult(
            [Emission("a", (12,), 2.0, "length")],
            step(
                *(1.5, 2.0, ["a"], [1, 1]),
                waiting=1,
                decode_tokens=1,
                dead_rows=1,
                slot_request_ids=["a", "b"],
                kv_free_tokens=8,
                kv_reservations=[KVReservation("a", 16, 6, False), KVReservation("b", 16, 3, True)],
            ),
        ),
        StepResult(
            [Emission("c", (30,), 3.0, "length")],
            step(
                *(2.0, 3.0, ["c"], [3]),
                prefill_tokens=3,
                slot_request_ids=["c", None],
                kv_free_tokens=24,
                kv_reservations=[KVReservation("c", 16, 3, False)],
            ),
        ),
    ]
    return requests, script


def timed_mixture() -> tuple[list[Request], list[StepResult]]:
    """An open loop measured over [1, 5]: several tokens at once, a failure, a rejection, tokens of outsiders.

    w arrives before the window; x is speculative (10 tokens in three arrivals, the last after the window); y fails
    after a token; z is rejected; u gets all its tokens in one arrival, after the window.
    """
    requests = [
        request("w", 1, 5, 0.5),
        request("x", 4, 10, 1.0, planned_cached=1),
        request("y", 2, 4, 2.0),
        request("z", 99, 4, 3.0),
        request("u", 2, 2, 5.0),
    ]
    script = [
        StepResult([Emission("w", (1, 2), 1.5)]),
        StepResult(
            [Emission("x", (1, 2, 3, 4), 2.0)],
            StepStats(1.0, 2.0, scheduled=["x"], draft_tokens=4, accepted_tokens=3, drafted={"x": (4, 3)}),
        ),
        StepResult([Emission("w", (3, 4, 5), 2.5, "length")]),
        StepResult(
            [Emission("x", (1, 2), 3.0), Emission("y", (7,), 3.0)],
            StepStats(2.0, 3.0, scheduled=["x", "y"], draft_tokens=4, accepted_tokens=1, drafted={"x": (4, 1)}),
        ),
        StepResult([Emission("z", (), 3.0, "rejected", "prompt of 99 tokens is longer than 16")]),
        StepResult([Emission("y", (), 4.0, "error", "boom")]),
        StepResult(
            [Emission("x", (3, 4, 1, 2), 5.5, "length")],
            StepStats(5.25, 5.5, scheduled=["x"], draft_tokens=4, accepted_tokens=3, drafted={"x": (4, 3)}),
        ),
        StepResult([Emission("u", (1, 2), 6.0, "stop")]),
    ]
    return requests, script
