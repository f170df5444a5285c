"""Random traffic through every policy and cache: what must hold whatever comes (see `simulation` for the checks)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation, request, total_tokens

from impls.batching.chunked_prefill import ChunkedPrefill
from impls.batching.continuous import PREEMPTION, ContinuousBatching
from impls.batching.order import ORDERS
from impls.batching.queues import QueueScheduler
from impls.batching.static import StaticBatching
from impls.kv_cache.blocks import BlockManager
from impls.kv_cache.contiguous import ContiguousCache
from impls.kv_cache.paged import PagedCache
from impls.seams import Arm, ModelShape

POLICIES = [ContinuousBatching, StaticBatching, ChunkedPrefill]
NAMES = {ContinuousBatching: "continuous", StaticBatching: "static", ChunkedPrefill: "chunked_prefill"}


def build(policy: type, cache: type, tokens: int, length: int, block_size: int = 4, **limits: Any) -> Simulation:
    options = {} if cache is ContiguousCache else {"block_size": block_size}
    kv: BlockManager = cache(budget_bytes=tokens, bytes_per_token=1, max_model_len=length, **options)
    scheduler: QueueScheduler = policy(kv=kv, max_model_len=length, **limits)
    return Simulation(scheduler, kv)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cache", [PagedCache, ContiguousCache])
@settings(max_examples=60)
@given(data=st.data())
def test_every_request_ends_once_within_every_limit(policy: type, cache: type, data: st.DataObject) -> None:
    length = data.draw(st.integers(4, 40), "max_model_len")
    tokens = data.draw(st.integers(length if cache is ContiguousCache else 8, 5 * length + 8), "cache")
    budget = data.draw(st.integers(length if policy.whole_prompts else 1, 3 * length), "max_num_batched_tokens")
    rows = data.draw(st.integers(1, min(8, budget)), "max_num_seqs")
    block_size = data.draw(st.sampled_from([1, 3, 4]), "block_size")
    options = {} if policy is StaticBatching else options_of_continuous(data)
    sim = build(policy, cache, tokens, length, block_size, max_num_seqs=rows, max_num_batched_tokens=budget, **options)
    most_drafts = data.draw(st.integers(0, 4), "drafts")
    sim.drafts = lambda rng: int(rng.integers(0, most_drafts + 1))
    sim.seed = data.draw(st.integers(0, 2**16), "seed")
    shapes = st.tuples(st.integers(1, length), st.integers(1, length), st.floats(0, 30))
    traffic = data.draw(st.lists(shapes, min_size=1, max_size=14), "traffic")
    requests = [request(str(i), prompt, output, arrival) for i, (prompt, output, arrival) in enumerate(traffic)]
    requests = [replace(r, priority=data.draw(st.integers(0, 2), "priority")) for r in requests]
    most = sum(2 * r.sampling.max_tokens + len(r.prompt_token_ids) for r in requests)
    sim.run(requests, max_steps=most * len(requests) + 100)
    assert sim.ended.keys() | sim.rejected.keys() == {r.request_id for r in requests}
    assert not sim.ended.keys() & sim.rejected.keys()
    arrival_order = [r.request_id for r in sorted(requests, key=lambda r: r.arrival_s) if r.request_id in sim.ended]
    assert sim.first_scheduled == arrival_order or sim.scheduler.order != "fcfs", "first come, first served"
    dead = sum(len(step.dead_rows) for step in sim.steps)
    padding = sum(sum(step.padding_tokens.values()) for step in sim.steps)
    assert policy is StaticBatching or dead == padding == 0
    for sequence in sim.ended.values():
        assert sequence.num_tokens == sequence.max_total_tokens
    if cache is ContiguousCache:
        assert all(sequence.preemptions == 0 for sequence in sim.ended.values()), "the whole length was reserved"


def options_of_continuous(data: st.DataObject) -> dict[str, Any]:
    return {
        "preemption": data.draw(st.sampled_from(PREEMPTION), "preemption"),
        "order": data.draw(st.sampled_from(ORDERS), "order"),
        "ageing_tokens_per_s": data.draw(st.sampled_from([0.1, 10.0]), "ageing"),
        "watermark": data.draw(st.sampled_from([0.0, 0.3]), "watermark"),
    }


@settings(max_examples=12)
@given(prompt=st.integers(1, 40), output=st.integers(1, 40), count=st.integers(1, 30), rows=st.integers(1, 9))
def test_with_constant_lengths_all_policies_compute_the_same(prompt: int, output: int, count: int, rows: int) -> None:
    """The negative control: no early finisher and no padding, so nothing that continuous batching could win."""
    counts = []
    for policy in POLICIES:
        sim = build(policy, PagedCache, 80 * 9, 80, max_num_seqs=rows)
        sim.run([request(str(i), prompt, output) for i in range(count)])
        counts.append((len(sim.steps), sum(total_tokens(step) for step in sim.steps)))
    assert counts == [(-(-count // rows) * output, count * (prompt + output - 1))] * len(POLICIES)


def test_with_capped_exponential_outputs_static_computes_more() -> None:
    """The positive control, at the ladder's lengths and four rows: the ratio of steps is what can be won."""
    rng = np.random.default_rng(7)
    outputs = np.minimum(1 + rng.exponential(48, 48).astype(int), 192)
    prompts = rng.integers(32, 97, 48)
    steps = {}
    for policy in POLICIES:
        sim = build(policy, ContiguousCache, 4 * 768, 768, max_num_seqs=4)
        sim.run([request(str(i), int(p), int(o)) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))])
        steps[policy] = len(sim.steps)
    assert 1.4 < steps[StaticBatching] / steps[ContinuousBatching] < 2.6


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_over_ten_thousand_sequences_costs_microseconds_each(policy: type) -> None:
    """Nothing in a step is quadratic. Measured: about 1 us of CPU time a sequence; the bounds are coarse."""
    per_sequence = {}
    for count in (1_000, 10_000):
        sim = build(policy, PagedCache, 64 * count, 64, 16, max_num_seqs=count, max_num_batched_tokens=8 * count)
        sim.check = False
        for i in range(count):
            sim.add(request(str(i), 4, 40))
        sim.scheduler.schedule(1.0)
        times = []
        for _ in range(3):
            for sequence in sim.live.values():
                sim._advance(sequence, sequence.num_tokens - sequence.num_computed_tokens)
            start = time.process_time()
            step = sim.scheduler.schedule(1.0)
            times.append(time.process_time() - start)
            assert len(step.num_scheduled_tokens) == count
        per_sequence[count] = min(times) / count
    assert per_sequence[10_000] < 20e-6
    assert per_sequence[10_000] < 8 * per_sequence[1_000], "the cost of one grows with the number of all"
    start = time.process_time()
    for sequence in list(sim.live.values()):
        sequence.finish_reason = "stop"
        sim.scheduler.finish(sequence)
    assert time.process_time() - start < 20e-6 * 10_000
    assert sim.kv.num_free_blocks == sim.kv.num_blocks


def arm(policy: str, **changes: Any) -> Arm:
    conf = Path(__file__).parents[2] / "conf" / "batching" / f"{policy}.yaml"
    config = {**yaml.safe_load(conf.read_text()), **changes}
    shape = ModelShape(64, 8, 8, 1, 1, 1, 8, 512)
    return Arm({"batching": config}, shape, 512, "cpu", 1 << 20)


@pytest.mark.parametrize("policy", [ContinuousBatching, StaticBatching])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"max_num_seqs": 2048}, None),
        ({"max_num_seqs": 2049}, "batching.max_num_seqs=2049: must be at most max_num_batched_tokens (2048)"),
        ({"max_num_seqs": 0}, "batching.max_num_seqs=0: must be an integer of at least 1"),
        ({"max_num_seqs": "many"}, "batching.max_num_seqs=many: must be an integer of at least 1"),
        ({"max_num_batched_tokens": 512}, None),
        ({"max_num_batched_tokens": 511}, "batching.max_num_batched_tokens=511: must be at least max_model_len (512)"),
        ({"max_num_batched_tokens": 0}, "batching.max_num_batched_tokens=0: must be null or an integer"),
    ],
)
def test_validate_names_the_option_the_value_and_what_is_allowed(policy: type, changes: Any, reason: Any) -> None:
    reasons = policy.validate(arm(NAMES[policy], **changes))
    assert reasons == [] if reason is None else len(reasons) == 1 and reasons[0].startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"max_num_batched_tokens": 64}, None),
        ({"max_num_batched_tokens": 31}, "batching.max_num_seqs=32: must be at most max_num_batched_tokens (31)"),
        ({"max_num_batched_tokens": 0}, "batching.max_num_batched_tokens=0: must be null or an integer"),
        ({"preemption": "drop"}, "batching.preemption=drop: must be one of recompute, swap"),
        ({"max_swapped_tokens": -1, "preemption": "swap"}, "batching.max_swapped_tokens=-1: must be null or a whole"),
        ({"max_swapped_tokens": 64}, "batching.max_swapped_tokens=64: only with batching.preemption=swap"),
        ({"max_swapped_tokens": 0, "preemption": "swap"}, None),
        ({"order": "longest"}, "batching.order=longest: must be one of fcfs, shortest_first, priority"),
        ({"ageing_tokens_per_s": 0.0}, "batching.ageing_tokens_per_s=0.0: must be a finite number above 0"),
        ({"watermark": 1.0}, "batching.watermark=1.0: must be a share of the blocks, at least 0 and below 1"),
    ],
)
def test_validate_of_the_options_of_continuous_batching(changes: Any, reason: Any) -> None:
    """Also those of chunked prefill, whose budget may be below max_model_len, but not below the rows."""
    reasons = ChunkedPrefill.validate(arm("chunked_prefill", **changes))
    assert reasons == [] if reason is None else len(reasons) == 1 and reasons[0].startswith(reason)
    if changes.keys() <= {"preemption", "max_swapped_tokens", "order", "ageing_tokens_per_s", "watermark"}:
        assert ContinuousBatching.validate(arm("continuous", **changes)) == reasons
        kv = PagedCache(budget_bytes=64, bytes_per_token=1, max_model_len=64)
        made = (ContinuousBatching, ChunkedPrefill)
        for policy in made if reason is not None else ():
            with pytest.raises(ValueError, match=reason.partition(":")[0]):
                policy(kv=kv, max_model_len=64, max_num_seqs=4, **changes)


def test_validate_of_the_static_options() -> None:
    assert StaticBatching.validate(arm("static", timeout_s=-1.0, emit="late")) == [
        "batching.timeout_s=-1.0: must be a finite number of seconds, at least 0",
        "batching.emit=late: must be one of step, batch_end",
    ]


def test_the_default_budget_is_2048_or_the_longest_request() -> None:
    for length, budget in ((512, 2048), (8192, 8192)):
        sim = build(ContinuousBatching, ContiguousCache, length, length, max_num_seqs=4)
        assert sim.scheduler.max_num_batched_tokens == budget
