from __future__ import annotations

import torch
from execution_model import SHAPE, TinyModel, TinyStorage, step

from impls.attention.reference import ReferenceAttention
from impls.execution.eager import EagerExecutor

CPU = torch.device("cpu")


def executor() -> EagerExecutor:
    return EagerExecutor(
        model=TinyModel(CPU), attention=ReferenceAttention(SHAPE, CPU), storage=TinyStorage(CPU), device=CPU
    )


def test_chunks_and_decode_give_the_logits_of_one_whole_step():
    whole, _ = executor().execute(step([(40, 40)], CPU))
    parts = executor()
    for query_len, kv_len in ((17, 17), (22, 39), (1, 40)):
        logits, hidden = parts.execute(step([(query_len, kv_len)], CPU))
        assert hidden.shape == (query_len, SHAPE.hidden_size)
    torch.testing.assert_close(logits, whole)


def test_a_sequence_does_not_depend_on_who_shares_its_step():
    alone, _ = executor().execute(step([(12, 12)], CPU))
    together, _ = executor().execute(step([(12, 12), (5, 5), (1, 1)], CPU))
    torch.testing.assert_close(together[:1], alone)


def test_logits_are_those_of_the_wanted_rows():
    batch = step([(6, 6), (3, 3)], CPU)
    batch.logits_indices = torch.tensor([5, 0, 8])
    run = executor()
    logits, hidden = run.execute(batch)
    torch.testing.assert_close(logits, run.model.logits(hidden[[5, 0, 8]]))


def test_draft_stops_after_the_first_layers():
    batch, run = step([(9, 9)], CPU), executor()
    first = run.draft(batch, 1)
    whole = run.draft(batch)
    torch.testing.assert_close(whole, run.execute(batch)[0])
    assert (first - whole).abs().max() > 0.01
    assert run.storage.k(1)[0, 8].isfinite().all()
    fresh = executor()
    torch.testing.assert_close(fresh.draft(batch, 1), first)
    assert fresh.storage.k(1).isnan().all(), "a draft of one layer must not write the second"


class CountingClock:
    """Time that passes only in attention: 1 s to store a layer's keys and values, 10 s to attend."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep_until(self, deadline_s: float) -> None:
        self.seconds = deadline_s


class SlowStorage(TinyStorage):
    clock: CountingClock

    def write(self, *args: object) -> None:
        self.clock.seconds += 1
        super().write(*args)


class SlowAttention(ReferenceAttention):
    clock: CountingClock

    def forward(self, *args: object) -> torch.Tensor:
        self.clock.seconds += 10
        return super().forward(*args)


def timed_executor(clock: CountingClock | None) -> EagerExecutor:
    attention, storage = SlowAttention(SHAPE, CPU), SlowStorage(CPU)
    attention.clock = storage.clock = clock or CountingClock()
    return EagerExecutor(model=TinyModel(CPU), attention=attention, storage=storage, device=CPU, clock=clock)


def test_attention_time_is_that_of_every_layer_of_one_step():
    run = timed_executor(CountingClock())
    assert run.attention_s is None
    for _ in range(2):  # not summed over steps
        run.execute(step([(5, 5), (1, 1)], CPU))
        assert run.attention_s == 11 * SHAPE.num_layers
    run.draft(step([(5, 5)], CPU), 1)
    assert run.attention_s == 11 * SHAPE.num_layers, "a draft is no part of the step's forward phase"


def test_attention_time_is_not_known_without_a_clock():
    run = timed_executor(None)
    run.execute(step([(5, 5)], CPU))
    assert run.attention_s is None
