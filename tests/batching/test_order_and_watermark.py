"""Who joins first, who yields last, who starves, and what an admission leaves free."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation, request

from impls.batching.chunked_prefill import ChunkedPrefill
from impls.batching.continuous import ContinuousBatching
from impls.batching.order import CLASS_TOKENS
from impls.kv_cache.hash_chain import HashChain
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.radix import RadixTree
from impls.request import Request
from impls.seams import Arm, ModelShape


def simulation(
    policy: type = ContinuousBatching, tokens: int = 1024, block_size: int = 4, **options: object
) -> Simulation:
    kv = PagedCache(budget_bytes=tokens, bytes_per_token=1, max_model_len=64, block_size=block_size)
    return Simulation(policy(kv=kv, max_model_len=64, **{"max_num_seqs": 1, **options}), kv)


def test_first_come_first_served_by_default() -> None:
    sim = simulation()
    sim.run([request(str(i), prompt, 2) for i, prompt in enumerate((30, 5, 10))])
    assert sim.first_scheduled == ["0", "1", "2"]


def test_shortest_first_and_equals_by_arrival() -> None:
    sim = simulation(order="shortest_first")
    sim.run([request(str(i), prompt, 2) for i, prompt in enumerate((30, 5, 10, 5))])
    assert sim.first_scheduled == ["1", "3", "2", "0"]


def test_priority_lowest_first_and_equals_by_arrival() -> None:
    sim = simulation(order="priority")
    sim.run([replace(request(str(i), 5, 2), priority=p) for i, p in enumerate((1, 0, -2, 1, 0))])
    assert sim.first_scheduled == ["2", "1", "4", "0", "3"]


@pytest.mark.parametrize("policy", [ContinuousBatching, ChunkedPrefill])
@settings(max_examples=15)
@given(
    long=st.integers(8, 40),
    short=st.integers(1, 4),
    output=st.integers(1, 5),
    rows=st.integers(1, 3),
    ageing=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_ageing_ends_the_wait_of_a_long_prompt_under_a_stream_of_short_ones(
    policy: type, long: int, short: int, output: int, rows: int, ageing: float
) -> None:
    """Four short prompts a second for ever, more than can be served: only who came before its turn goes before it."""
    sim = simulation(policy, order="shortest_first", ageing_tokens_per_s=ageing, max_num_seqs=rows)
    sim.check = False
    sequence = sim.add(request("long", long, 2))
    turn_s = (long - short) / ageing  # who arrives later stays behind it
    sooner = 4 * int(turn_s + 1)
    for second in range(sooner * output + 1):
        for i in range(4):
            sim.add(request(f"{second}.{i}", short, output))
        sim.step()
        if sequence.num_output_tokens:
            return
    raise AssertionError(f"starved: after {sooner * output + 1} s the long prompt has not run")


@pytest.mark.parametrize("policy", [ContinuousBatching, ChunkedPrefill])
@settings(max_examples=15)
@given(
    classes=st.integers(1, 3),
    output=st.integers(1, 5),
    rows=st.integers(1, 3),
    seconds_a_class=st.sampled_from([0.5, 2.0, 4.0]),
)
def test_ageing_ends_the_wait_of_the_least_urgent(
    policy: type, classes: int, output: int, rows: int, seconds_a_class: float
) -> None:
    """Four urgent ones a second for ever, more than can be served."""
    ageing = CLASS_TOKENS / seconds_a_class
    sim = simulation(policy, order="priority", ageing_tokens_per_s=ageing, max_num_seqs=rows)
    sim.check = False
    sequence = sim.add(replace(request("least", 4, 2), priority=classes))
    sooner = 4 * int(classes * seconds_a_class + 1)
    for second in range(sooner * output + 1):
        for i in range(4):
            sim.add(request(f"{second}.{i}", 4, output))
        sim.step()
        if sequence.num_output_tokens:
            assert second >= classes * seconds_a_class - 1, "before its turn"
            return
    raise AssertionError("starved")


@pytest.mark.parametrize(("order", "yields"), [("fcfs", "c"), ("shortest_first", "a"), ("priority", "b")])
def test_who_joined_last_in_the_order_yields_first_and_keeps_its_turn(order: str, yields: str) -> None:
    sim = simulation(tokens=36, block_size=1, max_num_seqs=3, order=order)
    for name, prompt, priority in (("a", 12, 1), ("b", 11, 2), ("c", 10, 0)):
        sim.add(replace(request(name, prompt, 8), priority=priority))
    sim.step()
    assert len(sim.scheduler.running) == 3
    sim.add(replace(request("later", 12, 8), priority=2))  # never before those that are equal and came first
    step = sim.until_preempted()
    assert step.preempted == (yields,)
    before = len(sim.steps)
    sim.run([])
    joined = next(
        s.num_scheduled_tokens for s in sim.steps[before:] if {yields, "later"} & s.num_scheduled_tokens.keys()
    )
    assert yields in joined


def test_one_that_joined_early_yields_to_those_that_go_before_it_in_the_order() -> None:
    sim = simulation(tokens=20, block_size=1, max_num_seqs=2, order="priority")
    sim.add(replace(request("low", 8, 10), priority=1))
    sim.step()
    sim.add(replace(request("high", 8, 10), priority=0))
    assert sim.until_preempted().preempted == ("low",)
    sim.run([])
    assert not sim.ended["high"].preemptions


def test_all_that_had_to_yield_come_back_in_their_order() -> None:
    sim = simulation(tokens=24, block_size=1, max_num_seqs=3, order="priority")
    for name, prompt, output, priority in (("a", 4, 20, 0), ("b", 4, 12, 1)):
        sim.add(replace(request(name, prompt, output), priority=priority))
    sim.step()
    sim.add(replace(request("c", 2, 12), priority=2))
    assert sim.until_preempted().preempted == ("c",)
    assert sim.until_preempted().preempted == ("b",)
    before = len(sim.steps)
    sim.run([])
    back = [name for step in sim.steps[before:] for name in step.num_scheduled_tokens if name != "a"]
    assert back.index("b") < back.index("c")


def test_one_that_was_aborted_leaves_no_trace_in_the_order() -> None:
    sim = simulation(order="shortest_first", ageing_tokens_per_s=1.0)
    for name, prompt in (("a", 9), ("b", 5), ("c", 7)):
        sim.add(request(name, prompt, 2))
    sim.scheduler.abort("b")
    del sim.live["b"]
    sim.add(request("b", 20, 2))
    sim.run([])
    assert sim.first_scheduled == ["c", "a", "b"]


def test_the_watermark_stays_free_at_admission_but_not_from_who_runs_nor_from_the_first() -> None:
    sim = simulation(tokens=40, block_size=4, max_num_seqs=4, watermark=0.3)  # three of ten blocks
    for name in "abc":
        sim.add(request(name, 11, 6))
    sim.step()
    assert [s.seq_id for s in sim.scheduler.running] == ["a", "b"], "a third would leave one block"
    for _ in range(5):
        assert not sim.step().preempted
    assert not sim.live.keys() & {"a", "b"}
    alone = simulation(tokens=40, block_size=4, watermark=0.3)
    alone.run([request("whole", 33, 4)])
    assert set(alone.ended) == {"whole"}


def test_without_a_watermark_the_same_traffic_preempts() -> None:
    sim = simulation(tokens=40, block_size=4, max_num_seqs=4)
    sim.run([request(name, 11, 6) for name in "abc"])
    assert sum(s.preemptions for s in sim.ended.values()) > 0


def known_to(sim: Simulation, *starts: int) -> None:
    """Prompts of sixteen tokens that begin with these numbers are computed, and stay in the cache."""
    for start in starts:
        sim.add(prompt_of(f"known {start}", start, 16))
    sim.run([])


def prompt_of(name: str, start: int, length: int, output: int = 2) -> Request:
    return replace(request(name, length, output), prompt_token_ids=tuple(range(start, start + length)))


def prefix_simulation(index: type = RadixTree, **options: object) -> Simulation:
    sim = simulation(order="longest_prefix_first", **options)
    sim.kv.share_prefixes(index(block_size=sim.kv.block_size))
    return sim


@pytest.mark.parametrize("index", [HashChain, RadixTree])
def test_who_finds_most_in_the_cache_joins_first_and_equals_by_arrival(index: type) -> None:
    sim = prefix_simulation(index)
    known_to(sim, 100, 200)
    for name, start, length in (("none", 300, 9), ("eight", 200, 9), ("sixteen", 100, 17), ("again", 100, 17)):
        sim.add(prompt_of(name, start, length))
    before = len(sim.first_scheduled)
    sim.run([])
    assert sim.first_scheduled[before:] == ["sixteen", "again", "eight", "none"]


@pytest.mark.parametrize("policy", [ContinuousBatching, ChunkedPrefill])
@settings(max_examples=10)
@given(length=st.integers(1, 30), output=st.integers(1, 4), ageing=st.sampled_from([0.5, 2.0, 8.0]))
def test_ageing_ends_the_wait_of_a_start_that_nobody_knows(
    policy: type, length: int, output: int, ageing: float
) -> None:
    """One request a second for ever, each of which finds sixteen tokens: those that came by its turn go before it."""
    sim = prefix_simulation(policy=policy, ageing_tokens_per_s=ageing)
    known_to(sim, 100)
    sim.check = False
    sequence = sim.add(prompt_of("unknown", 500, length))
    sooner = int(16 / ageing) + 2
    for second in range(sooner * max(output, 2) + 2):
        sim.add(prompt_of(str(second), 100, 17, output))
        sim.step()
        if sequence.num_output_tokens:
            return
    raise AssertionError("starved")


def test_it_needs_something_to_find() -> None:
    shape = ModelShape(64, 8, 8, 1, 1, 1, 8, 512)
    config = {"name": "continuous", "max_num_seqs": 4, "order": "longest_prefix_first"}

    def reasons(prefix: dict[str, str]) -> list[str]:
        return ContinuousBatching.validate(Arm({"batching": config, "prefix": prefix}, shape, 64, "cpu", 1 << 20))

    assert not reasons({"name": "radix", "_target_": "impls.kv_cache.radix.RadixTree"})
    (reason,) = reasons({"name": "off"})
    assert reason.startswith("batching.order=longest_prefix_first: needs prefix=hash_chain or radix")
