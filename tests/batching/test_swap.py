"""Preemption by swapping, without a model: the bookkeeping, and that every position is read back as it was written."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation, request, total_tokens

from impls.batching.chunked_prefill import ChunkedPrefill
from impls.batching.continuous import ContinuousBatching
from impls.kv_cache.paged import PagedCache
from impls.seams import ScheduledStep


@dataclass
class StoringSimulation(Simulation):
    """Keeps what a cache holds: of each slot, whose position was written there last."""

    slots: dict[int, tuple[str, int]] = field(default_factory=dict)
    host: dict[str, list[dict[int, tuple[str, int]]]] = field(default_factory=dict)

    def carry_out(self, step: ScheduledStep) -> None:
        size = self.kv.block_size
        for seq_id, blocks in step.swapped_out.items():
            self.host[seq_id] = [{i: self.slots.get(block * size + i) for i in range(size)} for block in blocks]
        limit = self.scheduler.max_swapped_tokens
        assert limit is None or size * sum(map(len, self.host.values())) <= limit, "more than fits waits in host memory"
        for seq_id, blocks in step.swapped_in.items():
            for block, kept in zip(blocks, self.host.pop(seq_id), strict=True):
                self.slots |= {block * size + i: owner for i, owner in kept.items()}
        for seq_id, count in step.num_scheduled_tokens.items():
            table, start = self.kv.block_table(seq_id), self.live[seq_id].num_computed_tokens
            where = [table[p // size] * size + p % size for p in range(start + count)]
            self.slots |= {slot: (seq_id, p) for p, slot in enumerate(where) if p >= start}
            read = [self.slots.get(slot) for slot in where]
            assert read == [(seq_id, p) for p in range(start + count)], f"{seq_id} attends to what it did not write"


def simulation(
    policy: type = ContinuousBatching, tokens: int = 16, block_size: int = 4, **options: object
) -> StoringSimulation:
    kv = PagedCache(budget_bytes=tokens, bytes_per_token=1, max_model_len=16, block_size=block_size)
    return StoringSimulation(
        policy(kv=kv, max_model_len=16, **{"max_num_seqs": 4, "preemption": "swap", **options}), kv
    )


def test_a_swap_by_hand() -> None:
    """a and b hold two blocks each of four; a's position 8 opens a third: b's two go to host memory, and come back."""
    sim = simulation()
    a, b = sim.add(request("a", 7, 3)), sim.add(request("b", 6, 4))
    sim.step()
    sim.step()
    held = tuple(sim.kv.block_table("b"))
    step = sim.step()
    assert step.preempted == ("b",) and step.swapped_out == {"b": held}
    assert (b.num_computed_tokens, b.num_tokens, b.preemptions) == (7, 8, 1), "nothing that it computed is lost"
    assert a.finished
    step = sim.step()
    assert step.num_scheduled_tokens == {"b": 1} and not step.swapped_out
    assert step.swapped_in == {"b": tuple(sim.kv.block_table("b")[:2])}
    sim.run([])
    assert sum(total_tokens(step) for step in sim.steps) == (7 + 2) + (6 + 3), "each position is computed once"


def test_only_blocks_that_hold_something_are_copied() -> None:
    """A prompt that is computed in part holds blocks for all of it, and one that opens a block holds none of it yet."""
    sim = simulation(ChunkedPrefill, tokens=20, max_num_seqs=2, max_num_batched_tokens=2)
    a = sim.add(request("a", 3, 13))
    sim.add(request("b", 11, 2))
    step = sim.until_preempted()
    b = sim.live["b"]
    assert 0 < b.num_computed_tokens < 11 and len(step.swapped_out["b"]) == -(-b.num_computed_tokens // 4) < 3
    sim.run([])
    assert a.preemptions == 0
    assert sum(total_tokens(step) for step in sim.steps) == (3 + 12) + (11 + 1)


def test_one_that_is_aborted_while_it_is_out_is_gone() -> None:
    sim = simulation()
    sim.add(request("a", 7, 9))
    sim.add(request("b", 6, 4))
    sim.until_preempted()
    sim.scheduler.abort("b")
    del sim.live["b"]
    sim.add(request("b", 2, 2))  # the name is free again, and nothing comes back under it
    sim.run([])
    assert not any(step.swapped_in for step in sim.steps)


def test_whoever_finds_no_room_in_host_memory_computes_again() -> None:
    """As by hand above, where b's two blocks of four are eight positions: one less, and they are lost."""
    for limit, kept in ((8, True), (7, False)):
        sim = simulation(max_swapped_tokens=limit)
        sim.add(request("a", 7, 3))
        b = sim.add(request("b", 6, 4))
        step = sim.until_preempted()
        assert step.preempted == ("b",) and bool(step.swapped_out) == kept
        assert b.num_computed_tokens == (7 if kept else 0)
        sim.run([])
        assert sum(total_tokens(step) for step in sim.steps) == (7 + 2) + (6 + 3) + (0 if kept else 7)


@pytest.mark.parametrize("leaves", [True, False])
def test_room_in_host_memory_is_found_again_when_somebody_has_left_it(leaves: bool) -> None:
    """c's one block of four, then b's two: with a limit of eight positions, only where c has gone."""
    sim = simulation(tokens=20, max_swapped_tokens=8)
    for name, prompt, output in (("a", 8, 8), ("b", 5, 11), ("c", 1, 7)):
        sim.add(request(name, prompt, output))
    assert sim.until_preempted().swapped_out.keys() == {"c"}
    if leaves:
        sim.scheduler.abort("c")
        del sim.live["c"], sim.host["c"]
    step = sim.until_preempted()
    assert step.preempted == ("b",) and bool(step.swapped_out) == leaves
    sim.run([])


@pytest.mark.parametrize("policy", [ContinuousBatching, ChunkedPrefill])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@settings(max_examples=40)
@given(data=st.data())
def test_every_position_is_read_as_it_was_written(policy: type, preemption: str, data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 5), "max_num_seqs")
    sim = simulation(
        policy,
        tokens=data.draw(st.integers(16, 40), "cache"),
        block_size=data.draw(st.sampled_from([1, 3, 4]), "block_size"),
        max_num_seqs=rows,
        max_num_batched_tokens=data.draw(st.integers(16 if policy.whole_prompts else rows, 24), "budget"),
        preemption=preemption,
        max_swapped_tokens=data.draw(st.none() | st.integers(0, 24), "limit") if preemption == "swap" else None,
        order=data.draw(st.sampled_from(["fcfs", "shortest_first"]), "order"),
    )
    most_drafts = data.draw(st.integers(0, 3), "drafts")
    sim.drafts = lambda rng: int(rng.integers(0, most_drafts + 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), "seed"))
    sim.run([request(str(i), int(rng.integers(1, 9)), int(rng.integers(1, 9)), float(i // 3)) for i in range(10)])
    assert len(sim.ended) + len(sim.rejected) == 10
    positions = sum(s.num_tokens - 1 for s in sim.ended.values())
    if preemption == "swap" and sim.scheduler.max_swapped_tokens is None and not most_drafts:
        assert sum(total_tokens(step) for step in sim.steps) == positions, "nothing is computed twice"
