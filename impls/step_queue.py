"""Steps that run one behind the other while the host prepares the next: `execution.overlap`."""

# mypy: allow-untyped-calls
# (`torch.cuda.Event` carries no annotations.)

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from impls.request import Request
from impls.seams import Clock, Executor, StepBatch

PLACEHOLDER = -1  # stands in a sequence for the token that a step in the queue yields
Sample = Callable[[Seq[Request], Seq[int], Tensor], Tensor]
Mark = float | torch.cuda.Event


@dataclass(frozen=True)
class Outcome:
    """token_ids: of each row of logits, -1 where these are not finite. forward_s, sample_s: as long as they ran, not as
    long as anybody waited for them; attention_s and replayed as of `Executor`."""

    token_ids: list[int]
    forward_s: float
    sample_s: float
    attention_s: float | None
    gathered_bytes: int
    replayed: bool


@dataclass
class Launched:
    """A step in the queue: it waits, runs, or is done."""

    batch: StepBatch
    requests: list[Request]  # whose logits it yields, in row order
    positions: list[int]  # of the token that each of them yields
    feed: Mapping[int, int]  # row of its input -> row of what the step before it yields
    before: Launched | None  # that step, until this one runs
    token_ids: Tensor | None = None  # int64 [R], where the device has them, from the moment when this step runs
    future: Future[Callable[[], Outcome]] = field(default_factory=Future)

    def wait(self) -> Outcome:
        """Whatever the step raised is raised here."""
        return self.future.result()()


class StepQueue:
    """Runs steps in the order in which they are launched, and launches each without waiting for the one before.

    On CUDA the device's own queue is what makes the host free: a launch only queues kernels there, and tokens go from
    step to step on the device. On a CPU a thread stands for the device; until all that was launched is done, the
    executor and the cache's tensors are that thread's alone.
    """

    def __init__(self, executor: Executor, sample: Sample, clock: Clock, device: torch.device) -> None:
        """sample: from requests, positions and logits [R, vocab] to token ids [R]: `Decoder.sample`."""
        self._executor, self._sample, self._clock, self._device = executor, sample, clock, device
        self._thread: ThreadPoolExecutor | None = None
        self._last: Launched | None = None

    def launch(
        self,
        batch: StepBatch,
        requests: list[Request],
        positions: list[int],
        feed: Mapping[int, int],
        before: Launched | None,
    ) -> Launched:
        """Arguments as the fields of `Launched`."""
        step = Launched(batch, requests, positions, feed, before)
        if self._device.type == "cuda":
            step.future.set_result(self._run(step))
        else:
            if self._thread is None:
                threads = torch.get_num_threads()  # a thread asks for its own number once, and may be told another
                self._thread = ThreadPoolExecutor(1, "execution", torch.set_num_threads, (threads,))
            step.future = self._thread.submit(self._run, step)
        self._last = step  # not before: what could not be launched is never done, and `settle` would wait for it
        return step

    def settle(self) -> None:
        """After this the host may touch the cache: what was launched is done, or lies before it in the device's own
        queue. What a step raised is left to `Launched.wait`."""
        if self._last is not None:
            self._last.future.exception()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = self._last = None

    def _run(self, step: Launched) -> Callable[[], Outcome]:
        executor = self._executor
        with torch.inference_mode():
            marks = [self._mark()]
            if step.feed:
                assert step.before is not None and step.before.token_ids is not None, "the step before this one failed"
                rows, sources = (self._put(list(part)) for part in (step.feed.keys(), step.feed.values()))
                # A token that is not there (-1) ends its sequence: what is computed in its place is dropped.
                step.batch.input_ids[rows] = step.before.token_ids[sources].clamp_(min=0)
            step.before = None
            logits, _ = executor.execute(step.batch)
            marks.append(self._mark())
            attention_s, gathered = executor.attention_s, executor.attention.gathered_bytes(step.batch)
            replayed = executor.replayed
            step.token_ids = found = self._sample(step.requests, step.positions, logits)
            on_host = found
            if self._device.type == "cuda":
                on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
                on_host.copy_(found, non_blocking=True)
            marks.append(self._mark())

        def outcome() -> Outcome:
            end = marks[-1]
            if isinstance(end, torch.cuda.Event):
                end.synchronize()
            forward_s, sample_s = _seconds(marks[0], marks[1]), _seconds(marks[1], end)
            return Outcome(on_host.tolist(), forward_s, sample_s, attention_s, gathered, replayed)

        return outcome

    def _put(self, numbers: list[int]) -> Tensor:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)

    def _mark(self) -> Mark:
        if self._device.type == "cpu":
            return self._clock.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3
