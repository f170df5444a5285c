"""Sequences that bring their keys and values along (swapped in, begun elsewhere) in caches that share or reserve.

Keys and values depend on all tokens up to their position, so that is what a slot holds here. What is in no table and
not kept for others is poison.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation

from impls.batching.chunked_prefill import ChunkedPrefill
from impls.batching.continuous import ContinuousBatching
from impls.kv_cache.hash_chain import HashChain
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.radix import RadixTree
from impls.kv_cache.reserved import ExactCache, Pow2Cache
from impls.request import Request, SamplingParams, Sequence
from impls.seams import KVCacheManager, ScheduledStep

Content = tuple[int, ...] | None  # None: poison
LENGTH = 16


@dataclass
class BringingSimulation(Simulation):
    """``elsewhere``: requests whose prompt and first token another engine has made."""

    slots: dict[int, Content] = field(default_factory=dict)
    host: dict[str, list[list[Content]]] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)

    def add(self, item: Request) -> Sequence:
        if item.request_id not in self.elsewhere:
            return super().add(item)
        prompt, size = item.prompt_token_ids, self.kv.block_size
        written: list[Content] = [prompt[: p + 1] for p in range(len(prompt))]
        written += [None] * (-len(prompt) % size)
        self.host[item.request_id] = [written[at : at + size] for at in range(0, len(written), size)]
        sequence = self.live[item.request_id] = Sequence(item, [*prompt, 0], num_computed_tokens=len(prompt))
        self.arrival[item.request_id] = len(self.arrival)
        self.scheduler.add(sequence, self.now_s)
        return sequence

    def carry_out(self, step: ScheduledStep) -> None:
        size = self.kv.block_size
        for seq_id, blocks in step.swapped_out.items():
            self.host[seq_id] = [[self.slots.get(block * size + i) for i in range(size)] for block in blocks]
        for seq_id, blocks in step.swapped_in.items():
            for block, kept in zip(blocks, self.host.pop(seq_id), strict=True):
                self.write(seq_id, block, dict(enumerate(kept)))
        for seq_id, count in step.num_scheduled_tokens.items():
            sequence, table = self.live[seq_id], self.kv.block_table(seq_id)
            for p in range(sequence.num_computed_tokens, sequence.num_computed_tokens + count):
                self.write(seq_id, table[p // size], {p % size: tuple(sequence.token_ids[: p + 1])})
        for seq_id, count in step.num_scheduled_tokens.items():
            sequence, table = self.live[seq_id], self.kv.block_table(seq_id)
            for p in range(sequence.num_computed_tokens + count):
                found = self.slots.get(table[p // size] * size + p % size)
                assert found == tuple(sequence.token_ids[: p + 1]), f"{seq_id} attends to what is not its own"

    def write(self, seq_id: str, block: int, contents: dict[int, Content]) -> None:
        others = [s.seq_id for s in self.scheduler.running if s.seq_id != seq_id]
        assert not any(block in self.kv.block_table(other) for other in others), "a block of another is written"
        assert block not in self.published(), "a published block is written"
        self.slots |= {block * self.kv.block_size + i: content for i, content in contents.items()}

    def published(self) -> dict[int, tuple[int, ...]]:
        index = getattr(self.kv, "_index", None)
        return {} if index is None else index.contents()

    def step(self) -> ScheduledStep:
        step = super().step()
        size, published = self.kv.block_size, self.published()
        tables = [self.kv.block_table(s.seq_id) for s in self.scheduler.running]
        if getattr(self.kv, "_index", None) is not None:
            for sequence, table in zip(self.scheduler.running, tables, strict=True):
                full = table[: sequence.num_computed_tokens // size]
                assert published.keys() >= set(full), f"{sequence.seq_id} does not share what it has computed"
        alive = published.keys() | {block for table in tables for block in table}
        self.slots = {slot: content for slot, content in self.slots.items() if slot // size in alive}
        return step


CACHES: dict[str, Any] = {
    "off": (PagedCache, None),
    "hash_chain": (PagedCache, HashChain),
    "radix": (PagedCache, RadixTree),
    "exact": (ExactCache, None),
    "pow2": (Pow2Cache, None),
}


def cache(name: str, tokens: int, block_size: int) -> KVCacheManager:
    kind, index = CACHES[name]
    kv: KVCacheManager = kind(budget_bytes=tokens, bytes_per_token=1, max_model_len=LENGTH, block_size=block_size)
    if index is not None:
        kv.share_prefixes(index(block_size=block_size))
    return kv


@pytest.mark.parametrize("policy", [ContinuousBatching, ChunkedPrefill])
@pytest.mark.parametrize("name", CACHES)
@settings(max_examples=40)
@given(data=st.data())
def test_everyone_ends_and_reads_what_was_written_for_it(policy: Any, name: str, data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4]), "block_size")
    kv = cache(name, data.draw(st.integers(16, 40), "cache"), block_size)
    rows = data.draw(st.integers(2, 5), "max_num_seqs")
    budget = data.draw(st.integers(LENGTH if policy.whole_prompts else rows, 24), "budget")
    scheduler = policy(
        kv=kv,
        max_model_len=LENGTH,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        preemption="swap",
        max_swapped_tokens=data.draw(st.none() | st.integers(0, 24), "limit"),
        order=data.draw(st.sampled_from(["fcfs", "shortest_first"]), "order"),
        watermark=data.draw(st.sampled_from([0.0, 0.3]), "watermark"),
    )
    sim = BringingSimulation(scheduler, kv)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), "seed"))
    requests = []
    for i in range(10):
        prompt, output = int(rng.integers(1, 9)), int(rng.integers(2, 9))
        tokens = (*range(1, prompt), int(rng.integers(1, 4)))  # a shared start, and an end that may be its own
        requests.append(Request(f"{i}", tokens, SamplingParams(max_tokens=output), float(i // 3)))
    sim.elsewhere = {r.request_id for r in requests if rng.random() < 0.4}
    sim.run(requests)
    assert len(sim.ended) == 10 and not sim.host


@pytest.mark.parametrize("name", ["hash_chain", "radix"])
def test_what_was_swapped_in_is_found_by_others_also_what_it_computed_since(name: str) -> None:
    kv = cache(name, 16, 2)
    scheduler = ContinuousBatching(kv=kv, max_model_len=LENGTH, max_num_seqs=4, preemption="swap")
    sim = BringingSimulation(scheduler, kv)
    sim.add(Request("a", (9,) * 7, SamplingParams(max_tokens=4)))
    b = sim.add(Request("b", (5,) * 6, SamplingParams(max_tokens=8)))
    assert sim.until_preempted().swapped_out.keys() == {"b"}
    while "b" in sim.live:
        last = sim.step()
    assert b.finished and last.num_scheduled_tokens == {"b": 1}
    assert kv.begin("c", [*b.token_ids, 1]) == 12


@pytest.mark.parametrize("name", ["exact", "pow2"])
def test_one_that_was_begun_elsewhere_reserves_all_that_it_will_need(name: str) -> None:
    """A cache that was not told its final length would give it a piece for its first 5 tokens, 8, which it outgrows."""
    kv = cache(name, 32, 4)
    sim = BringingSimulation(ContinuousBatching(kv=kv, max_model_len=LENGTH, max_num_seqs=4), kv)
    sim.elsewhere = {"a"}
    sim.add(Request("a", (1, 2, 3, 4), SamplingParams(max_tokens=8)))
    sim.step()
    assert kv.reserved_tokens("a") == 16
    sim.run([])
