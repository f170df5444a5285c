"""Static batching, without a model: exact counts of what padding and dead rows cost."""

from __future__ import annotations

import pytest
from simulation import Simulation, request, total_tokens

from impls.batching.static import StaticBatching
from impls.kv_cache.contiguous import ContiguousCache
from impls.kv_cache.paged import PagedCache


def simulation(tokens: int = 4096, block_size: int = 16, max_model_len: int = 256, **options: object) -> Simulation:
    kv = PagedCache(budget_bytes=tokens, bytes_per_token=1, max_model_len=max_model_len, block_size=block_size)
    limits = {"max_num_seqs": 3, "timeout_s": 0.0, **options}
    return Simulation(StaticBatching(kv=kv, max_model_len=max_model_len, **limits), kv)


def test_a_batch_by_hand() -> None:
    """Prompts 2, 5, 3 and outputs 1, 4, 2: padded to 5; a dies after step 1, c after 2, b ends the batch in 4."""
    sim = simulation()
    sim.run([request("a", 2, 1), request("b", 5, 4), request("c", 3, 2), request("later", 4, 1)])
    assert [step.num_scheduled_tokens for step in sim.steps] == [
        {"a": 2, "b": 5, "c": 3},
        {"a": 1, "b": 1, "c": 1},
        {"a": 1, "b": 1, "c": 1},
        {"a": 1, "b": 1, "c": 1},
        {"later": 4},
    ]
    assert [step.padding_tokens for step in sim.steps] == [{"a": 3, "c": 2}, {}, {}, {}, {}]
    assert [step.dead_rows for step in sim.steps] == [(), ("a",), ("a", "c"), ("a", "c"), ()]
    assert [total_tokens(step) for step in sim.steps] == [15, 3, 3, 3, 4]


def test_padding_is_allocated_and_a_dead_row_keeps_and_does_not_grow() -> None:
    sim = simulation(block_size=1, max_num_seqs=2)
    sim.add(request("short", 2, 1))
    sim.add(request("long", 6, 5))
    sim.step()
    assert (sim.kv.reserved_tokens("short"), sim.kv.reserved_tokens("long")) == (6, 6)
    for grown in (7, 8, 9):
        assert sim.step().dead_rows == ("short",)
        assert (sim.kv.reserved_tokens("short"), sim.kv.reserved_tokens("long")) == (6, grown)
        assert [s.seq_id for s in sim.scheduler.running] == ["short", "long"]
        assert list(sim.scheduler.slots) == ["short", "long"]
    sim.step()
    assert sim.kv.num_free_blocks == sim.kv.num_blocks and list(sim.scheduler.slots) == [None, None]


def test_finish_says_whether_the_cache_is_free() -> None:
    sim = simulation()
    a, b = sim.add(request("a", 4, 9)), sim.add(request("b", 4, 9))
    sim.step()
    a.finish_reason = b.finish_reason = "stop"
    assert sim.scheduler.finish(a) is False
    assert sim.kv.reserved_tokens("a") == 16
    assert sim.scheduler.finish(b) is True
    assert sim.kv.num_free_blocks == sim.kv.num_blocks


def test_formed_by_size_or_by_the_wait_of_the_oldest() -> None:
    sim = simulation(timeout_s=0.5, max_num_seqs=2)
    sim.add(request("a", 4, 1))
    assert sim.scheduler.schedule(0.0).is_empty and sim.scheduler.next_event_s(0.0) == 0.5
    assert sim.scheduler.schedule(0.49).is_empty
    sim.now_s = 0.3
    sim.add(request("b", 4, 1))
    assert set(sim.step().num_scheduled_tokens) == {"a", "b"}, "complete: no wait"
    sim.now_s = 2.0
    sim.add(request("c", 4, 1))
    assert sim.scheduler.next_event_s(2.1) == 2.5
    sim.now_s = 2.5
    assert set(sim.step().num_scheduled_tokens) == {"c"}
    assert sim.scheduler.next_event_s(9.0) is None


def test_no_batch_starts_while_others_hold_the_cache() -> None:
    """As on a prefill worker, whose prompts stay until a decode worker has copied them. It must not be asked again
    and again meanwhile: only an order can change anything."""
    sim = simulation(tokens=32)
    sim.kv.allocate("held", 17)
    sim.add(request("a", 4, 1))
    assert sim.step().is_empty and sim.scheduler.next_event_s(9.0) is None
    sim.kv.free("held")
    assert sim.scheduler.next_event_s(9.0) == 0.0
    sim.kv.allocate("held", 16)
    sim.add(request("b", 4, 1))
    assert set(sim.step().num_scheduled_tokens) == {"a"}, "as many as there is room for"
    sim.kv.free("held")
    assert set(sim.step().num_scheduled_tokens) == {"b"}


def test_a_batch_that_cannot_grow_does_not_wait() -> None:
    kv = ContiguousCache(budget_bytes=2 * 64, bytes_per_token=1, max_model_len=64)
    sim = Simulation(StaticBatching(kv=kv, max_model_len=64, max_num_seqs=8, timeout_s=1e6), kv)
    for name in "abc":
        sim.add(request(name, 4, 2))
    assert set(sim.step().num_scheduled_tokens) == {"a", "b"}, "the cache holds two"


def test_padded_prompts_stay_within_the_step_budget() -> None:
    sim = simulation(max_model_len=32, max_num_batched_tokens=40, max_num_seqs=4)
    sim.run([request("a", 10, 2), request("b", 10, 2), request("long", 14, 2), request("d", 10, 2)])
    assert [set(step.num_scheduled_tokens) for step in sim.steps[::2]] == [{"a", "b"}, {"long", "d"}]
    assert sim.steps[2].padding_tokens == {"d": 4}


def test_drafts_grow_only_live_rows_and_leave_room_for_the_dead() -> None:
    sim = simulation(max_model_len=12, max_num_batched_tokens=12, max_num_seqs=3)
    for name, output in (("a", 1), ("b", 8), ("c", 8)):
        sim.add(request(name, 4, output))
    sim.step()
    for sequence in sim.scheduler.running[1:]:
        sequence.draft_token_ids = [0] * 7
    assert sim.step().num_scheduled_tokens == {"a": 1, "b": 8, "c": 3}


def test_the_youngest_live_row_leaves_a_batch_that_outgrows_the_cache() -> None:
    sim = simulation(tokens=16, block_size=1, max_model_len=16, max_num_seqs=3)
    sim.run([request("a", 5, 1), request("b", 5, 6), request("c", 5, 6)])
    assert sim.steps[1].preempted == ("c",)  # 15 of 16 are held, b takes the last
    assert [step.num_scheduled_tokens for step in sim.steps[1:6]] == [{"a": 1, "b": 1}] * 5
    assert sim.steps[6].num_scheduled_tokens == {"c": 6} and sim.ended["c"].preemptions == 1


def test_a_last_row_that_the_dead_leave_no_room_starts_the_next_batch_at_once() -> None:
    sim = simulation(tokens=12, block_size=1, max_model_len=12, max_num_seqs=2, timeout_s=1e6)
    sim.add(request("dead", 6, 1))
    sim.add(request("b", 6, 6))
    sim.step()
    step = sim.step()
    assert step.preempted == ("b",) and step.num_scheduled_tokens == {"b": 7} and step.dead_rows == ()
    sim.run([])
    assert set(sim.ended) == {"dead", "b"}


def test_abort_of_the_last_live_row_ends_the_batch() -> None:
    sim = simulation()
    sim.add(request("a", 4, 1))
    sim.add(request("b", 4, 9))
    sim.step()
    with pytest.raises(KeyError):
        sim.scheduler.abort("a")  # finished: its row stays until the batch ends
    sim.scheduler.abort("b")
    assert sim.kv.num_free_blocks == sim.kv.num_blocks and set(sim.scheduler.slots) == {None}


def test_abort_of_one_that_waits() -> None:
    sim = simulation(timeout_s=5.0)
    sim.add(request("a", 4, 1))
    sim.now_s = 1.0
    sim.add(request("b", 4, 1))
    sim.scheduler.abort("a")
    assert sim.scheduler.next_event_s(1.0) == 6.0, "b is the oldest now"


def test_emit_is_the_engines_to_read() -> None:
    assert simulation().scheduler.emit == "step"
    assert simulation(emit="batch_end").scheduler.emit == "batch_end"
    with pytest.raises(ValueError, match=r"batching\.emit=never: must be one of step, batch_end"):
        simulation(emit="never")
