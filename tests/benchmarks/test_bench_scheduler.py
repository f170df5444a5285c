"""Scheduler and allocator: a decode step should cost at most 50 us + 2 us a sequence.

Timed in CPU time of the thread, with garbage collection off as in a measured window; the best of 64 steps. What fails a
test is a step that costs more than so many times a bare loop over the same sequences, timed in turns with it: twice the
work is seen on a fast machine, and a slow or busy one is not taken for it. Where the target was set, a loop takes
0.16 us a sequence: no more loops are allowed than its 12. Whether this machine met the target is in the record.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
from conftest import best_seconds

from impls.batching.continuous import ContinuousBatching
from impls.batching.queues import QueueScheduler
from impls.batching.static import StaticBatching
from impls.kv_cache.contiguous import ContiguousCache
from impls.kv_cache.paged import PagedCache
from impls.request import Request, SamplingParams, Sequence
from impls.seams import KVCacheManager, ScheduledStep

pytestmark = pytest.mark.benchmark(timer=time.thread_time, disable_gc=True)

SEQUENCES = [1, 256, 4096]
PROMPT, BLOCK, MAX_MODEL_LEN = 30, 16, 512
STEPS = 64  # in which every table grows by four blocks
DECODE_LOOPS, STATIC_LOOPS = 4.5, 5.5  # measured: 2.4 to 3.2 and 2.9 to 4.2, on two cores shared by nine processes
DRAFTING_LOOPS = 12.0  # the same step with 4 drafts for every sequence: 2.3 to 6.7; this is the target itself
FIXED = 25  # sequences' worth that a step may cost without any: the target's 50 us / 2 us


def rows_of(step: ScheduledStep) -> int:
    """What the model computes in this step; nothing is padded here."""
    return sum(step.num_scheduled_tokens.values())


class Judge:
    """Times a bare loop before every round of what it judges; what counts is the median of the rounds' ratios."""

    def __init__(self, sequences: dict[str, Sequence]) -> None:
        self._sequences = sequences
        self._ids = list(sequences) * -(-256 // len(sequences))
        self._found: dict[str, int] = {}
        self._loop_s: list[float] = []  # for one sequence

    def time_bare_loop(self) -> None:
        """Two lookups, a few attributes and a sum for each sequence: about what any scheduler has to do."""
        sequences, found, total = self._sequences, self._found, 0
        start = time.thread_time()
        for seq_id in self._ids:
            sequence = sequences[seq_id]
            found[seq_id] = len(sequence.token_ids) - sequence.num_computed_tokens
            total += found[seq_id]
        self._loop_s.append((time.thread_time() - start) / len(self._ids))

    def check(self, benchmark: Any, count: int, most_loops: float) -> None:
        """A step over ``count`` sequences costs no more than it may; its figures go to the record."""
        best = best_seconds(benchmark)
        if best is None:
            return
        rounds = zip(benchmark.stats.stats.data, self._loop_s, strict=True)
        loops = median(step_s / (loop_s * (count + FIXED)) for step_s, loop_s in rounds)
        target_s = 50e-6 + 2e-6 * count
        benchmark.extra_info.update(
            target_s=target_s, met=best < target_s, bare_loop_s=min(self._loop_s) * count, loops=loops
        )
        assert loops < most_loops


def paged(num_tokens: int) -> PagedCache:
    return PagedCache(budget_bytes=num_tokens, bytes_per_token=1, max_model_len=MAX_MODEL_LEN, block_size=BLOCK)


def waiting(scheduler: QueueScheduler, count: int, max_tokens: int = 200) -> dict[str, Sequence]:
    sequences = {}
    for i in range(count):
        sequence = Sequence(Request(f"request-{i}", tuple(range(PROMPT)), SamplingParams(max_tokens=max_tokens)))
        sequences[sequence.seq_id] = sequence
        scheduler.add(sequence, 0.0)
    return sequences


def advance(step: ScheduledStep, sequences: dict[str, Sequence], drafts: int = 0) -> None:
    """The engine's part, not timed: every sequence gains a token, its drafts being rejected."""
    for seq_id in step.num_scheduled_tokens:
        sequence = sequences[seq_id]
        sequence.token_ids.append(7)
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        sequence.draft_token_ids = [7] * drafts


def schedule_and_commit(scheduler: QueueScheduler, kv: KVCacheManager, sequences: dict[str, Sequence]) -> ScheduledStep:
    """A step's scheduling and allocation, and the commit of what the step before it computed."""
    step = scheduler.schedule(0.0)
    commit = kv.commit
    for seq_id in step.num_scheduled_tokens:
        commit(seq_id, sequences[seq_id].num_computed_tokens)
    return step


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("count", SEQUENCES)
def test_decode_step(benchmark: Any, count: int, drafts: int) -> None:
    kv = paged(count * 256)
    scheduler = ContinuousBatching(
        kv=kv, max_model_len=MAX_MODEL_LEN, max_num_seqs=count, max_num_batched_tokens=max(512, count * PROMPT)
    )
    sequences = waiting(scheduler, count)
    steps = [scheduler.schedule(0.0)]
    judge = Judge(sequences)

    def between() -> tuple[tuple[Any, ...], dict[str, Any]]:
        advance(steps[-1], sequences, drafts)
        judge.time_bare_loop()
        return (scheduler, kv, sequences), {}

    def timed(*parts: Any) -> None:
        steps.append(schedule_and_commit(*parts))

    benchmark.pedantic(timed, setup=between, rounds=STEPS)
    done = len(steps) - 1
    assert all(rows_of(step) == count * (1 + drafts) and not step.preempted for step in steps[1:])
    blocks = -(-(PROMPT + done + drafts) // BLOCK)
    assert kv.num_blocks - kv.num_free_blocks == count * blocks
    benchmark.extra_info.update(steps=done, tokens=sum(rows_of(step) for step in steps[1:]), blocks=count * blocks)
    judge.check(benchmark, count, DRAFTING_LOOPS if drafts else DECODE_LOOPS)


@pytest.mark.parametrize("count", SEQUENCES)
def test_admission_and_end(benchmark: Any, count: int) -> None:
    """All join in one step and leave after it. No target: it happens to a sequence once, not in every step."""
    kv = paged(count * 64)
    scheduler = ContinuousBatching(
        kv=kv, max_model_len=MAX_MODEL_LEN, max_num_seqs=count, max_num_batched_tokens=max(512, count * PROMPT)
    )

    def arrive() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (waiting(scheduler, count, max_tokens=1),), {}

    def timed(sequences: dict[str, Sequence]) -> None:
        step = scheduler.schedule(0.0)
        assert rows_of(step) == count * PROMPT
        for seq_id, sequence in sequences.items():
            kv.commit(seq_id, PROMPT)
            scheduler.finish(sequence)

    benchmark.pedantic(timed, setup=arrive, rounds=24)
    assert kv.num_free_blocks == kv.num_blocks and not scheduler.running
    benchmark.extra_info.update(tokens=count * PROMPT, blocks=count * 2)


@pytest.mark.parametrize("count", SEQUENCES)
def test_static_step(benchmark: Any, count: int) -> None:
    kv = ContiguousCache(budget_bytes=count * MAX_MODEL_LEN, bytes_per_token=1, max_model_len=MAX_MODEL_LEN)
    scheduler = StaticBatching(
        kv=kv, max_model_len=MAX_MODEL_LEN, max_num_seqs=count, max_num_batched_tokens=max(512, count * PROMPT)
    )
    sequences = waiting(scheduler, count)
    steps = [scheduler.schedule(1.0)]
    judge = Judge(sequences)

    def between() -> tuple[tuple[Any, ...], dict[str, Any]]:
        advance(steps[-1], sequences)
        judge.time_bare_loop()
        return (scheduler, kv, sequences), {}

    def timed(*parts: Any) -> None:
        steps.append(schedule_and_commit(*parts))

    benchmark.pedantic(timed, setup=between, rounds=STEPS)
    assert all(rows_of(step) == count for step in steps[1:])
    assert kv.num_free_blocks == 0
    benchmark.extra_info.update(steps=len(steps) - 1, blocks=count)
    judge.check(benchmark, count, STATIC_LOOPS)


@pytest.mark.parametrize("count", SEQUENCES)
def test_allocator(benchmark: Any, count: int) -> None:
    """Every sequence grows to 4 blocks, token by token in strides of 8, and is freed: 9 calls a sequence."""
    kv = paged(count * 64)
    ids = [f"request-{i}" for i in range(count)]

    def grow_and_free() -> int:
        for length in range(8, 65, 8):
            for seq_id in ids:
                assert kv.allocate(seq_id, length)
        held = kv.num_blocks - kv.num_free_blocks
        for seq_id in ids:
            kv.free(seq_id)
        return held

    held = benchmark.pedantic(grow_and_free, rounds=10, warmup_rounds=1)
    assert held == count * 4 and kv.num_free_blocks == kv.num_blocks
    kv.check_invariants()
    benchmark.extra_info.update(blocks=held, calls=9 * count)
