"""Samples of one request, without a model: their prompt is computed once, held once, and nobody writes where another
one reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation, request, total_tokens

from impls.batching.chunked_prefill import ChunkedPrefill
from impls.batching.continuous import ContinuousBatching
from impls.kv_cache.blocks import BlockManager
from impls.kv_cache.contiguous import ContiguousCache
from impls.kv_cache.hash_chain import HashChain
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.radix import RadixTree
from impls.kv_cache.reserved import ExactCache
from impls.seams import ScheduledStep

LENGTH = 24
Owner = tuple[str, int]  # a position, of the prompt of a request, or behind it of a sequence


@dataclass
class SharingSimulation(Simulation):
    """Keeps what each slot holds: poison (nothing) whenever its block is handed out anew."""

    slots: dict[int, Owner] = field(default_factory=dict)
    host: dict[str, list[dict[int, Owner | None]]] = field(default_factory=dict)

    def content(self, seq_id: str, position: int) -> Owner:
        """With an index, equal outputs (here they all are) may be shared as well."""
        item = self.live[seq_id].request
        shared = position < len(item.prompt_token_ids) or getattr(self.kv, "_index", None) is not None
        return (f"prompt {item.prompt_token_ids}" if shared else seq_id, position)

    def carry_out(self, step: ScheduledStep) -> None:
        size = self.kv.block_size
        for seq_id, blocks in step.swapped_out.items():
            self.host[seq_id] = [{i: self.slots.get(block * size + i) for i in range(size)} for block in blocks]
        if isinstance(self.kv, BlockManager):
            for block in self.kv._free:
                self._poison(block)
        for seq_id, blocks in step.swapped_in.items():
            for block, kept in zip(blocks, self.host.pop(seq_id), strict=True):
                self.slots |= {block * size + i: owner for i, owner in kept.items() if owner}
        held = Counter(b for s in self.scheduler.running for b in self.kv.block_table(s.seq_id))
        for source, target in step.copied_blocks.values():
            assert held[target] == 1, "the copy is somebody else's as well"
            self._poison(target)
            kept = {i: self.slots.get(source * size + i) for i in range(size)}
            self.slots |= {target * size + i: owner for i, owner in kept.items() if owner}
        for seq_id, count in step.num_scheduled_tokens.items():
            table, start = self.kv.block_table(seq_id), self.live[seq_id].num_computed_tokens
            for position in range(start, start + count):
                block = table[position // size]
                assert held[block] == 1, f"{seq_id} writes to a block that others hold"
                self.slots[block * size + position % size] = self.content(seq_id, position)
        for seq_id, count in step.num_scheduled_tokens.items():
            table = self.kv.block_table(seq_id)
            end = self.live[seq_id].num_computed_tokens + count
            read = [self.slots.get(table[p // size] * size + p % size) for p in range(end)]
            assert read == [self.content(seq_id, p) for p in range(end)], f"{seq_id} attends to what is not its own"

    def _poison(self, block: int) -> None:
        for i in range(self.kv.block_size):
            self.slots.pop(block * self.kv.block_size + i, None)


def simulation(
    policy: type = ContinuousBatching,
    cache: type = PagedCache,
    tokens: int = 96,
    index: type | None = None,
    **options: Any,
) -> SharingSimulation:
    own = {} if cache is ContiguousCache else {"block_size": 4}
    kv = cache(budget_bytes=tokens, bytes_per_token=1, max_model_len=LENGTH, **own)
    if index is not None:
        kv.share_prefixes(index(block_size=4))
    return SharingSimulation(policy(kv=kv, max_model_len=LENGTH, **{"max_num_seqs": 8, **options}), kv)


def submit(sim: Simulation, name: str, prompt: int, output: int, n: int, start: int = 0) -> None:
    item = request(name, prompt, output)
    item = replace(item, prompt_token_ids=tuple(start + t for t in item.prompt_token_ids))
    for sample in replace(item, sampling=replace(item.sampling, n=n)).samples():
        sim.add(sample)


def test_four_samples_by_hand() -> None:
    """A prompt of ten in blocks of four: two full blocks are held by all, the third is copied for all but the first."""
    sim = simulation()
    submit(sim, "r", 10, 3, n=4)
    first = sim.step()
    assert first.num_scheduled_tokens == {"r#0": 10} and not first.copied_blocks
    second = sim.step()
    assert second.num_scheduled_tokens == {"r#0": 1, "r#1": 1, "r#2": 1, "r#3": 1}
    assert second.cached_tokens == {"r#1": 9, "r#2": 9, "r#3": 9}, "all but the last, which has logits of its own"
    tables = [list(sim.kv.block_table(f"r#{i}")) for i in range(4)]
    assert all(table[:2] == tables[0][:2] for table in tables) and len({table[2] for table in tables}) == 4
    assert second.copied_blocks == {f"r#{i}": (tables[0][2], tables[i][2]) for i in (1, 2, 3)}
    assert sim.kv.shared_tokens == 3 * 8
    sim.run([])
    assert sum(total_tokens(step) for step in sim.steps) == 10 + 2 + 3 * (1 + 2)


def test_a_prompt_of_whole_blocks_and_one_token_copies_nothing() -> None:
    sim = simulation()
    submit(sim, "r", 9, 3, n=3)
    sim.run([])
    assert not any(step.copied_blocks for step in sim.steps)
    assert sum(total_tokens(step) for step in sim.steps) == 9 + 2 + 2 * (1 + 2)


def test_a_prompt_in_chunks_is_waited_for() -> None:
    sim = simulation(ChunkedPrefill, max_num_batched_tokens=8)
    submit(sim, "r", 15, 2, n=2)
    assert [dict(sim.step().num_scheduled_tokens) for _ in range(3)] == [{"r#0": 8}, {"r#0": 7}, {"r#0": 1, "r#1": 1}]
    sim.run([])


def test_a_sample_whose_siblings_have_all_ended_computes_the_prompt() -> None:
    sim = simulation(max_num_seqs=1)
    submit(sim, "r", 10, 2, n=2)
    sim.run([])
    assert sum(total_tokens(step) for step in sim.steps) == 2 * (10 + 1)


@pytest.mark.parametrize("cache", [ContiguousCache, ExactCache])
def test_a_cache_without_blocks_to_share(cache: type) -> None:
    """contiguous: nothing is held twice, but the prompt is copied instead of computed; in one piece: neither."""
    sim = simulation(cache=cache, tokens=4 * 32)
    submit(sim, "r", 10, 3, n=3)
    sim.run([])
    rows = sum(total_tokens(step) for step in sim.steps)
    assert rows == (10 + 2 + 2 * 3 if cache is ContiguousCache else 3 * 12)
    assert sum(len(step.copied_blocks) for step in sim.steps) == (2 if cache is ContiguousCache else 0)


@pytest.mark.parametrize("policy", [ContinuousBatching, ChunkedPrefill])
@pytest.mark.parametrize("index", [None, HashChain, RadixTree])
@settings(max_examples=20)
@given(data=st.data())
def test_every_sample_ends_once_and_reads_its_own(policy: type, index: type | None, data: st.DataObject) -> None:
    """Little memory, preemption of both kinds, any order, drafts: references add up and no block leaks (`Simulation`
    checks both after every step)."""
    orders = ["fcfs", "shortest_first", *(["longest_prefix_first"] if index else [])]
    sim = simulation(
        policy,
        tokens=data.draw(st.integers(LENGTH, 3 * LENGTH), "cache"),
        index=index,
        max_num_seqs=data.draw(st.integers(1, 5), "rows"),
        max_num_batched_tokens=data.draw(st.integers(5 if policy is ChunkedPrefill else LENGTH, 40), "budget"),
        preemption=data.draw(st.sampled_from(["recompute", "swap"]), "preemption"),
        order=data.draw(st.sampled_from(orders), "order"),
    )
    most_drafts = data.draw(st.integers(0, 3), "drafts")
    sim.drafts = lambda rng: int(rng.integers(0, most_drafts + 1))
    shapes = st.tuples(st.integers(1, LENGTH - 1), st.integers(1, 8), st.integers(1, 4))
    expected = set()
    for i, (prompt, output, n) in enumerate(data.draw(st.lists(shapes, min_size=1, max_size=4), "traffic")):
        submit(sim, f"r{i}", prompt, output, n, start=100 * i)
        expected |= {f"r{i}"} if n == 1 else {f"r{i}#{k}" for k in range(n)}
        sim.step()
    sim.run([])
    assert sim.ended.keys() | sim.rejected.keys() == expected
    assert sim.kv.shared_tokens == 0
