"""Continuous batching, without a model: joins, leaves, budgets, preemption."""

from __future__ import annotations

import pytest
from simulation import Simulation, request, total_tokens

from impls.batching.continuous import ContinuousBatching
from impls.kv_cache.contiguous import ContiguousCache
from impls.kv_cache.paged import PagedCache
from impls.request import Sequence


def simulation(tokens: int = 4096, block_size: int = 16, max_model_len: int = 256, **options: object) -> Simulation:
    kv = PagedCache(budget_bytes=tokens, bytes_per_token=1, max_model_len=max_model_len, block_size=block_size)
    limits = {"max_num_seqs": 4, **options}
    return Simulation(ContinuousBatching(kv=kv, max_model_len=max_model_len, **limits), kv)


def test_join_and_leave_at_every_step() -> None:
    sim = simulation(max_num_seqs=2)
    sim.run([request("a", 5, 3), request("b", 7, 1), request("c", 4, 2), request("d", 6, 1)])
    assert [step.num_scheduled_tokens for step in sim.steps] == [
        {"a": 5, "b": 7},
        {"a": 1, "c": 4},  # c takes b's row at once, its whole prompt beside a's decode
        {"a": 1, "c": 1},
        {"d": 6},
    ]
    assert not any(step.padding_tokens or step.dead_rows for step in sim.steps)


def test_a_row_is_kept_from_admission_to_leaving() -> None:
    sim = simulation(max_num_seqs=3)
    for name, output in (("a", 1), ("b", 5), ("c", 2)):
        sim.add(request(name, 4, output))
    sim.step()
    assert list(sim.scheduler.slots) == [None, "b", "c"]
    sim.add(request("d", 4, 5))
    sim.step()
    assert list(sim.scheduler.slots) == ["d", "b", None]
    assert [s.seq_id for s in sim.scheduler.running] == ["b", "d"]  # in order of arrival, not of rows


def test_a_prompt_joins_exactly_to_the_budget_beside_decodes_and_drafts() -> None:
    for drafts, joins in ((4, True), (5, False)):
        sim = simulation(max_model_len=32, max_num_batched_tokens=40, max_num_seqs=8)
        for name in "ab":
            sim.add(request(name, 10, 12))
        sim.step()
        for sequence in sim.scheduler.running:
            sequence.draft_token_ids = [0] * drafts
        sim.add(request("c", 30, 2))
        sim.add(request("d", 1, 2))
        step = sim.step()
        assert total_tokens(step) == 2 * (1 + drafts) + (30 if joins else 0)
        assert "d" not in step.num_scheduled_tokens, "nobody overtakes c, nor goes past the budget"


def test_drafts_are_cut_to_the_budget_before_any_required_token() -> None:
    sim = simulation(max_model_len=8, max_num_batched_tokens=8, max_num_seqs=4)
    for name in "abcd":
        sim.add(request(name, 2, 6))
    sim.step()
    for sequence in sim.scheduler.running:
        sequence.draft_token_ids = [7, 8, 9]
    assert sim.scheduler.schedule(1.0).num_scheduled_tokens == {"a": 4, "b": 2, "c": 1, "d": 1}
    assert [s.draft_token_ids for s in sim.scheduler.running] == [[7, 8, 9], [7], [], []]


def test_drafts_are_cut_to_max_model_len() -> None:
    sim = simulation(max_model_len=16)
    sim.add(request("a", 13, 3))
    sim.step()
    sim.scheduler.running[0].draft_token_ids = [7, 8, 9]
    assert sim.scheduler.schedule(1.0).num_scheduled_tokens == {"a": 3}, "positions 13 to 15 are the last"


def test_drafts_are_dropped_before_anybody_is_preempted() -> None:
    sim = simulation(tokens=16, block_size=4, max_model_len=16)
    for name in "ab":
        sim.add(request(name, 7, 4))  # two blocks each: the cache is full
    sim.step()
    for sequence in sim.scheduler.running:
        sequence.draft_token_ids = [7, 8]
    step = sim.scheduler.schedule(1.0)
    assert step.preempted == ()
    assert step.num_scheduled_tokens == {"a": 1, "b": 1}  # position 7 is the last of two blocks of four
    assert all(not s.draft_token_ids for s in sim.scheduler.running)


def test_the_youngest_is_preempted_recomputed_and_keeps_what_it_emitted() -> None:
    sim = simulation(tokens=16, block_size=4, max_model_len=16)
    a, b = sim.add(request("a", 7, 3)), sim.add(request("b", 6, 4))
    sim.step()
    sim.step()
    emitted = list(b.token_ids)
    b.draft_token_ids = [1]
    step = sim.step()  # a needs position 8, its third block
    assert step.preempted == ("b",) and step.num_scheduled_tokens == {"a": 1}
    assert (b.num_computed_tokens, b.draft_token_ids, b.preemptions) == (0, [], 1)
    assert b.token_ids == emitted and b.num_output_tokens == 2
    assert a.finished and sim.kv.num_free_blocks == sim.kv.num_blocks
    assert sim.step().num_scheduled_tokens == {"b": 8}  # prompt and outputs, as one
    sim.run([])


def test_preempted_sequences_return_to_the_front_in_order_of_arrival() -> None:
    sim = simulation(tokens=16, block_size=1, max_model_len=16)
    for name in "abc":
        sim.add(request(name, 5, 7))
    sim.add(request("d", 2, 1))
    sim.step()
    assert sim.step().preempted == ("c",)  # 15 of 16 are held
    while not (step := sim.step()).preempted:
        assert step.num_scheduled_tokens.keys() == {"a", "b"}, "d would fit, but c came before"
    assert step.preempted == ("b",)
    sim.run([])
    later = [list(step.num_scheduled_tokens) for step in sim.steps if "d" in step.num_scheduled_tokens]
    assert later == [["c", "d"]]


def test_nobody_joins_in_a_step_that_preempts() -> None:
    sim = simulation(tokens=20, block_size=4, max_model_len=20)
    sim.add(request("a", 7, 8))
    sim.add(request("b", 2, 8))
    sim.step()
    assert sim.kv.allocate("b", 12)  # a proposer's lookahead: all five blocks are held
    sim.step()
    step = sim.step()  # a needs a third block; b would fit into what its going leaves, at the price of a prefill
    assert step.preempted == ("b",) and step.num_scheduled_tokens == {"a": 1}
    assert sim.step().num_scheduled_tokens == {"a": 1, "b": 4}


def test_bug_5_a_token_just_sampled_has_no_key_yet() -> None:
    """nano-vllm#150/#240: at len % block == 1 the newest token opens a block when it runs, and not before."""
    sim = simulation(tokens=64, block_size=4, max_model_len=16)
    a = sim.add(request("a", 3, 6))
    sim.step()
    assert (a.num_tokens, a.num_computed_tokens, len(sim.kv.block_table("a"))) == (4, 3, 1)
    sim.step()
    assert (a.num_tokens, a.num_computed_tokens, len(sim.kv.block_table("a"))) == (5, 4, 1)
    sim.step()
    assert (a.num_tokens, a.num_computed_tokens, len(sim.kv.block_table("a"))) == (6, 5, 2)


@pytest.mark.parametrize("cache", [PagedCache, ContiguousCache])
def test_bug_15_what_can_never_run_is_rejected_and_the_others_go_on(cache: type) -> None:
    """vllm#39734: within max_model_len, but larger than the cache: a deadlock there."""
    tokens = 64 if cache is PagedCache else 300
    kv = cache(budget_bytes=tokens, bytes_per_token=1, max_model_len=100)
    sim = Simulation(ContinuousBatching(kv=kv, max_model_len=100, max_num_seqs=4), kv)
    sim.run(
        [
            request("long_prompt", 101, 1),
            request("long_sum", 60, 41),
            request("cache_prompt", 65, 1),
            request("cache_sum", 60, 5),
            request("fits", 60, 4),
            request("many", 4, 4, n=2),
            request("empty", 0, 4),
            request("nothing", 4, 0),
        ]
    )
    small = {"cache_prompt", "cache_sum"} if cache is PagedCache else set()
    assert set(sim.rejected) == {"long_prompt", "long_sum", "many", "empty", "nothing"} | small
    assert set(sim.ended) == {"fits", "cache_prompt", "cache_sum"} - small
    assert "= 101 tokens, max_model_len is 100" in sim.rejected["long_sum"]
    assert all("the whole KV cache holds 64" in sim.rejected[name] for name in small)


def test_bug_16_recomputing_is_work_not_a_prefix_hit() -> None:
    """vllm#25780: whatever is preempted is computed again in full, and shows as such."""
    sim = simulation(tokens=64, block_size=4, max_model_len=64)
    sim.run([request(name, 10, 20) for name in "abcde"])
    rows = sum(total_tokens(step) for step in sim.steps)
    assert sum(s.preemptions for s in sim.ended.values()) > 0
    assert rows > 5 * (10 + 19)  # without a preemption each position is computed once, the last token's never


def test_a_preemption_storm_ends() -> None:
    """Thirty sequences that each want nearly the whole cache: the oldest always advances, so all end."""
    sim = simulation(tokens=64, block_size=1, max_model_len=64, max_num_seqs=30)
    sim.run([request(str(i), 2, 62) for i in range(30)], max_steps=62 * 30 * 2)
    assert len(sim.ended) == 30 and sim.first_scheduled == [str(i) for i in range(30)]
    assert sum(s.preemptions for s in sim.ended.values()) > 30


def test_a_recomputation_as_long_as_the_budget_gets_in_as_others_leave() -> None:
    sim = simulation(tokens=64, block_size=1, max_model_len=32, max_num_batched_tokens=32, max_num_seqs=8)
    for name in "abc":
        sim.add(request(name, 2, 29))
    while not any(s.preemptions for s in sim.live.values()):
        sim.step()
    sim.run([])
    assert set(sim.ended) == {"a", "b", "c"}
    assert max(step.num_scheduled_tokens.get("c", 0) for step in sim.steps) > 16


def test_abort_frees_whoever_it_is() -> None:
    sim = simulation(max_num_seqs=1)
    for name in "abc":
        sim.add(request(name, 4, 4))
    sim.add(request("too_long", 400, 4))
    sim.step()
    sim.add(request("never", 400, 4))
    for name in ("a", "b", "never"):
        sim.scheduler.abort(name)
        del sim.live[name]
    assert sim.kv.num_free_blocks == sim.kv.num_blocks and sim.scheduler.num_waiting == 1
    with pytest.raises(KeyError):
        sim.scheduler.abort("a")
    sim.run([])
    assert set(sim.ended) == {"c"} and set(sim.rejected) == {"too_long"}


def test_an_id_is_used_once() -> None:
    sim = simulation()
    sequence = sim.add(request("a", 4, 4))
    with pytest.raises(ValueError, match="already"):
        sim.scheduler.add(sequence, 0.0)
    sim.step()
    with pytest.raises(ValueError, match="already"):
        sim.scheduler.add(Sequence(request("a", 1, 1)), 0.0)
