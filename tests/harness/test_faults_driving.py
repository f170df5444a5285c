"""Faults that other benchmark tools had in sending and recording, by their numbers in the reference list."""

from __future__ import annotations

import time
from typing import Any

import pytest
from golden import FixedStream, play, request

from harness.drive import RealClock, VirtualClock, drive
from harness.latencies import request_latencies
from harness.metrics import compute_metrics
from harness.recorder import Recorder
from harness.records import TELEMETRY_SCHEMA, empty_frame
from impls.request import Request
from impls.seams import Emission, StepResult, StepStats
from workloads import build_stream


class ClumsyClock(VirtualClock):
    """Every wait ends 1 ms late and every look at it takes 50 us, as with a timer of a busy host."""

    def now(self) -> float:
        self.advance(50e-6)
        return super().now()

    def sleep_until(self, deadline_s: float) -> None:
        super().sleep_until(deadline_s)
        self.advance(1e-3)


class Server:
    """Serves whatever it has in one step of ``step_s``, one token each; knows how many it has held at once."""

    def __init__(self, clock: VirtualClock, step_s: float) -> None:
        self._clock, self._step_s = clock, step_s
        self._waiting: list[str] = []
        self.most = 0

    def add_request(self, request: Request) -> None:
        self._waiting.append(request.request_id)
        self.most = max(self.most, len(self._waiting))

    def step(self, until: float) -> StepResult:
        start = self._clock.now()
        self._clock.advance(self._step_s)
        served, self._waiting = self._waiting, []
        end = self._clock.now()
        stats = StepStats(start, end, scheduled=served, running=len(served))
        return StepResult([Emission(name, (1,), end, "length") for name in served], stats)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def abort(self, request_id: str) -> None:
        self._waiting.remove(request_id)

    def close(self) -> None:
        self._waiting.clear()


def driven(clock: VirtualClock, step_s: float, stream: Any) -> tuple[Recorder, Server]:
    recorder, server = Recorder(), Server(clock, step_s)
    assert drive(server, stream, recorder, clock, initial=stream.initial())
    return recorder, server


def test_f8_lateness_of_one_wait_is_not_handed_on_to_the_next() -> None:
    """500 requests a second: relative sleeps would be 0.6 s late after a second, deadlines are 1 ms late throughout."""
    stream = FixedStream([request(str(i), 1, 1, i / 500) for i in range(1, 501)])
    recorder, _ = driven(ClumsyClock(), 0.0002, stream)
    requests = recorder.requests()
    late = (requests["submitted_s"] - requests["intended_s"]).to_numpy(float)
    assert (late >= 0).all() and late.max() < 0.002
    span = requests["submitted_s"].iloc[-1] - requests["submitted_s"].iloc[0]
    assert 499 / span == pytest.approx(500, rel=0.005)  # achieved / asked for


def test_35_a_driver_that_falls_behind_skips_nothing_and_resets_nothing() -> None:
    stream = FixedStream([request(str(i), 1, 1, i / 100) for i in range(300)])
    recorder, _ = driven(VirtualClock(), 1.0, stream)  # 100 of them arrive while a step runs
    requests = recorder.requests()
    assert requests["intended_s"].tolist() == [i / 100 for i in range(300)]
    assert (requests["finish_reason"] == "length").all()
    latencies = request_latencies(requests)
    assert latencies["ttft_s"].min() >= 1.0 and latencies["ttft_s"].max() > 1.9  # its wait for the step included


def test_34_a_burst_is_submitted_whole_before_its_first_step() -> None:
    recorder, server = driven(ClumsyClock(), 0.1, FixedStream([request(str(i), 1, 1) for i in range(50)]))
    submitted = recorder.requests()["submitted_s"]
    assert server.most == 50 and len(recorder.steps()) == 1
    assert submitted.max() < recorder.steps()["start_s"].iloc[0] and submitted.max() - submitted.min() < 0.01


@pytest.mark.parametrize("concurrency", [1, 7, 32])
def test_40_as_many_in_flight_as_were_asked_for(concurrency: int) -> None:
    config = {
        "name": "closed",
        "num_requests": 100,
        "arrivals": {"name": "closed_loop", "concurrency": concurrency},
        "prompt_length": {"name": "constant", "value": 4},
        "output_length": {"name": "constant", "value": 1},
        "prompts": {"name": "random"},
    }
    stream = build_stream(config, seed=0, tokenizer=None, max_model_len=64, vocab_size=500)
    recorder, server = driven(VirtualClock(), 0.5, stream)
    assert server.most == concurrency and len(recorder.requests()) == 100


def test_f1_an_emission_without_a_token_is_no_first_token() -> None:
    script = [
        StepResult([Emission("a", (), 0.125)]),  # as a chat server's chunk that only names the role
        StepResult([Emission("a", (7,), 0.5)]),
        StepResult([Emission("a", (8,), 0.75, "length")]),
        StepResult([Emission("a", (), 1.0)]),  # and one that only counts what was used
    ]
    requests = play([request("a", 2, 2)], script[:3]).requests()
    assert requests["first_token_s"].tolist() == [0.5]
    assert request_latencies(requests)["ttft_s"].tolist() == [0.5]
    assert request_latencies(requests)["e2e_s"].tolist() == [0.75]
    late = Recorder()
    late.submitted(request("a", 2, 2), 0.0)
    for result in script:
        late.step(result)
    with pytest.raises(ValueError, match="'a' emitted after its end"):
        late.requests()


def test_22_tokens_are_the_ids_that_arrived_whatever_text_they_make() -> None:
    """Special tokens, and ids whose text merges with the one before: an id is a token, no chunk is encoded again."""
    script = [StepResult([Emission("a", (0, 0, 0), 1.0)]), StepResult([Emission("a", (1, 2), 1.5, "stop")])]
    requests = play([request("a", 2, 9)], script).requests()
    assert requests["output_tokens"].tolist() == [5]
    assert requests["output_token_ids"].iloc[0].tolist() == [0, 0, 0, 1, 2]
    _, metrics, _ = compute_metrics(
        requests, Recorder().steps(), empty_frame(TELEMETRY_SCHEMA), window_rule="timed", last_arrival_s=2.0
    )
    assert metrics["output_tokens"] == 5 and metrics["itl_s"]["p50"] == 0.25


def test_27_tpot_divides_by_the_tokens_that_came_not_by_those_asked_for() -> None:
    script = [StepResult([Emission("a", (1,), 1.0)]), StepResult([Emission("a", (2, 3), 2.0, "stop")])]
    latencies = request_latencies(play([request("a", 2, 100)], script).requests())
    assert latencies["tpot_s"].tolist() == [0.5] and latencies["normalized_latency_s"].tolist() == [2 / 3]


def test_f2_and_46_a_request_whose_end_never_came_is_a_record_and_a_failure() -> None:
    recorder = Recorder()
    for name in ("served", "lost"):
        recorder.submitted(request(name, 2, 4), 0.0)
    recorder.step(StepResult([Emission("served", (1,), 1.0, "length"), Emission("lost", (1,), 1.0)]))
    requests = recorder.requests()
    assert requests["finish_reason"].tolist() == ["length", "aborted"]
    assert request_latencies(requests)["outcome"].tolist() == ["finished", "failed"]


class Waiting(Server):
    """Has work and runs nothing, as `static` does while it waits for company."""

    def step(self, until: float) -> StepResult:
        self._clock.sleep_until(until)
        return StepResult()


def test_a_target_that_waits_can_be_stopped_and_makes_no_progress() -> None:
    """Ctrl-C does not wait with it; and were its wait told as a step, one that waits for ever would be no hang."""
    clock, told, asked = RealClock(), list[StepResult](), iter([False, False, True])
    began = time.monotonic()
    stream = FixedStream([request("a", 4, 4)])
    target: Any = Waiting(clock, 0.0)  # type: ignore[arg-type]
    ended = drive(
        target,
        stream,  # type: ignore[arg-type]
        recorder := Recorder(),
        clock,
        initial=stream.initial(),
        on_step=told.append,
        should_stop=lambda: next(asked),
    )
    assert not ended and told == [] and time.monotonic() - began < 5
    assert list(recorder.requests()["finish_reason"]) == ["aborted"] and not target.has_work
