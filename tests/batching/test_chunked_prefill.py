"""Chunked prefill, without a model: budgets, decodes first, a partial prompt's place, drafts last."""

from __future__ import annotations

from simulation import Simulation, request, total_tokens

from impls.batching.chunked_prefill import ChunkedPrefill
from impls.kv_cache.paged import PagedCache


def simulation(tokens: int = 4096, block_size: int = 16, max_model_len: int = 256, **options: object) -> Simulation:
    kv = PagedCache(budget_bytes=tokens, bytes_per_token=1, max_model_len=max_model_len, block_size=block_size)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, **options}
    return Simulation(ChunkedPrefill(kv=kv, max_model_len=max_model_len, **limits), kv)


def scheduled(sim: Simulation) -> list[dict[str, int]]:
    return [step.num_scheduled_tokens for step in sim.steps]


def test_prompts_by_hand() -> None:
    """Budget 8: a's 3 tokens, then b's 20 in parts beside a's decodes; c joins with what b's last part leaves."""
    sim = simulation()
    sim.run([request("a", 3, 5), request("b", 20, 2), request("c", 4, 1)])
    assert scheduled(sim) == [
        {"a": 3, "b": 5},
        {"a": 1, "b": 7},
        {"a": 1, "b": 7},
        {"a": 1, "b": 1, "c": 4},
        {"a": 1, "b": 1},
    ]


def test_a_prompt_may_be_longer_than_the_budget_and_yields_its_token_with_its_last_part() -> None:
    sim = simulation(max_num_batched_tokens=6)
    a = sim.add(request("a", 15, 2))
    for computed in (6, 12):
        sim.step()
        assert (a.num_computed_tokens, a.num_tokens) == (computed, 15)
    sim.step()
    assert (a.num_computed_tokens, a.num_tokens) == (15, 16)
    sim.run([])
    assert scheduled(sim) == [{"a": 6}, {"a": 6}, {"a": 3}, {"a": 1}]


def test_decodes_come_first_and_leave_a_prompt_at_least_one_token() -> None:
    sim = simulation(max_num_seqs=4, max_num_batched_tokens=4)
    for name in "abc":
        sim.add(request(name, 1, 20))
    sim.step()
    sim.add(request("long", 5, 2))
    for _ in range(5):
        assert sim.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1, "long": 1}
    assert sim.live["long"].num_output_tokens == 1


def test_a_partial_prompt_keeps_its_row_and_its_blocks_and_nobody_joins_before_it_is_done() -> None:
    sim = simulation(block_size=4)
    long = sim.add(request("long", 30, 2))
    sim.add(request("short", 2, 1))
    sim.step()
    row, table = sim.scheduler.slots.index("long"), list(sim.kv.block_table("long"))
    assert len(table) == 8, "all that the prompt needs is held from the start"
    while long.num_computed_tokens < 24:
        assert sim.step().num_scheduled_tokens == {"long": 8}
        assert sim.scheduler.slots.index("long") == row and list(sim.kv.block_table("long")) == table
    assert sim.step().num_scheduled_tokens == {"long": 6, "short": 2}


def test_drafts_get_only_what_neither_decodes_nor_prompts_want() -> None:
    sim = simulation(max_num_batched_tokens=12)
    for name in "ab":
        sim.add(request(name, 2, 30))
    sim.step()

    def offer() -> None:
        for name in "ab":
            sim.live[name].draft_token_ids = [7, 7, 7]

    offer()
    sim.add(request("c", 15, 4))
    assert sim.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 10}, "a prompt that joins goes before drafts"
    offer()
    assert sim.step().num_scheduled_tokens == {"a": 4, "b": 3, "c": 5}, "and so does one that goes on"


def test_a_preempted_partial_prompt_starts_again_and_keeps_its_turn() -> None:
    sim = simulation(tokens=32, block_size=4, max_model_len=32, max_num_batched_tokens=4)
    a = sim.add(request("a", 3, 20))
    b, c = sim.add(request("b", 22, 2)), sim.add(request("c", 1, 1))
    step = sim.until_preempted()
    assert step.preempted == ("b",) and step.num_scheduled_tokens == {"a": 1} and b.num_computed_tokens == 0
    sim.run([])
    assert not a.preemptions and not c.preemptions
    assert sim.first_scheduled == ["a", "b", "c"]


def test_nobody_joins_in_a_step_that_preempts() -> None:
    sim = simulation(tokens=20, block_size=4, max_model_len=20)
    sim.add(request("a", 5, 8))
    sim.add(request("b", 2, 8))
    sim.step()
    assert sim.kv.allocate("b", 12)  # a proposer's lookahead: all five blocks are held
    step = sim.until_preempted()  # a needs a third block; b would fit into what its going leaves
    assert step.preempted == ("b",) and step.num_scheduled_tokens == {"a": 1}
    assert set(sim.step().num_scheduled_tokens) == {"a", "b"}


def test_the_longest_step_is_the_budget_where_continuous_batching_takes_a_whole_prompt() -> None:
    sim = simulation(max_num_seqs=4, max_num_batched_tokens=16)
    sim.run([request(str(i), 100 if i % 3 == 0 else 5, 10) for i in range(12)])
    assert max(total_tokens(step) for step in sim.steps) == 16
    assert sum(total_tokens(step) for step in sim.steps) == sum(100 if i % 3 == 0 else 5 for i in range(12)) + 12 * 9
