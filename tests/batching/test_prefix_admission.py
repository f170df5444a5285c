"""Admission with blocks that are shared: random traffic of few distinct starts, every promise of `simulation` kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation, request

from impls.batching.chunked_prefill import ChunkedPrefill
from impls.batching.continuous import ContinuousBatching
from impls.kv_cache.hash_chain import HashChain
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.radix import RadixTree


@pytest.mark.parametrize("policy", [ContinuousBatching, ChunkedPrefill])
@pytest.mark.parametrize("index", [HashChain, RadixTree])
@settings(max_examples=40)
@given(data=st.data())
def test_every_request_ends_once_whatever_it_shares(policy: type, index: type, data: st.DataObject) -> None:
    length = data.draw(st.integers(4, 40), "max_model_len")
    tokens = data.draw(st.integers(length + 4, 5 * length + 8), "cache")
    block_size = data.draw(st.sampled_from([1, 3, 4]), "block_size")
    budget = data.draw(st.integers(1 if policy is ChunkedPrefill else length, 3 * length), "max_num_batched_tokens")
    rows = data.draw(st.integers(1, min(8, budget)), "max_num_seqs")
    watermark = data.draw(st.sampled_from([0.0, 0.2]), "watermark")
    preemption = data.draw(st.sampled_from(["recompute", "swap"]), "preemption")
    kv = PagedCache(budget_bytes=tokens, bytes_per_token=1, max_model_len=length, block_size=block_size)
    kv.share_prefixes(index(block_size=block_size))
    limits = {"max_num_seqs": rows, "max_num_batched_tokens": budget}
    options = {"watermark": watermark, "preemption": preemption}
    sim = Simulation(policy(kv=kv, max_model_len=length, **limits, **options), kv)
    most_drafts = data.draw(st.integers(0, 4), "drafts")
    sim.drafts = lambda rng: int(rng.integers(0, most_drafts + 1))
    shapes = st.tuples(st.integers(1, length), st.integers(1, length), st.floats(0, 30), st.integers(0, 2))
    traffic = data.draw(st.lists(shapes, min_size=1, max_size=14), "traffic")
    requests = []
    for i, (prompt, output, arrival, start) in enumerate(traffic):
        plain = request(str(i), prompt, output, arrival)
        requests.append(replace(plain, prompt_token_ids=tuple(start * 100 + t for t in plain.prompt_token_ids)))
    sim.run(requests, max_steps=sum(2 * r.sampling.max_tokens for r in requests) * len(requests) + 100 * length)
    assert sim.ended.keys() | sim.rejected.keys() == {r.request_id for r in requests}
    assert kv.num_free_blocks == kv.num_blocks and kv.shared_tokens == 0


@pytest.mark.parametrize("index", [HashChain, RadixTree])
def test_what_is_found_costs_no_budget_and_leaves_the_blocks_alone_that_it_cannot_have(index: type) -> None:
    kv = PagedCache(budget_bytes=64, bytes_per_token=1, max_model_len=40, block_size=4)
    kv.share_prefixes(index(block_size=4))
    sim = Simulation(ContinuousBatching(kv=kv, max_model_len=40, max_num_seqs=4, max_num_batched_tokens=40), kv)
    sim.add(request("first", 32, 8))
    assert sim.step().num_scheduled_tokens == {"first": 32}
    sim.add(request("again", 32, 8))
    step = sim.step()
    assert step.num_scheduled_tokens == {"first": 1, "again": 4} and step.cached_tokens == {"again": 28}
    assert kv.shared_tokens == 28
    while sim.live:
        sim.step()
    sim.add(request("other", 39, 1))
    assert sim.step().cached_tokens == {"other": 32}
    sim.add(request("x", 3, 1))
    assert sim.step().cached_tokens == {"x": 0}
