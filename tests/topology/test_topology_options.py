"""What a topology makes of an arm: each worker's share, and why an arm cannot run."""

from __future__ import annotations

import pytest
from topology_runs import config_of

from harness.arm import validate_arm
from impls.build import worker_configs
from impls.kv_cache.paged import PagedCache
from impls.topology.held_blocks import holding

PAIR = "topology=disaggregated"


def test_workers_divide_the_budget_and_have_a_policy_of_their_own() -> None:
    config = config_of(
        *(PAIR, "topology.prefill.workers=2", "topology.prefill.batching=static", "topology.prefill.max_num_seqs=3"),
        *("topology.decode.threads=2", "topology.prefill.kv_share=0.5"),
    )
    workers = worker_configs(config)
    assert list(workers) == ["prefill0", "prefill1", "decode0"]
    whole = config["kv_cache"]["budget_bytes"]
    assert [workers[name]["kv_cache"]["budget_bytes"] for name in workers] == [whole // 4, whole // 4, whole // 2]
    assert [workers[name]["batching"]["name"] for name in workers] == ["static", "static", "continuous"]
    assert [workers[name]["batching"]["max_num_seqs"] for name in workers] == [3, 3, 4]
    assert [workers[name]["device"]["threads"] for name in workers] == [1, 1, 2]
    assert config["kv_cache"]["budget_bytes"] == whole, "the arm's own config was changed"
    assert validate_arm(config) == []


def test_replicas_are_equal_parts_and_a_single_engine_is_the_whole() -> None:
    config = config_of("topology=replicas", "topology.workers=4")
    workers = worker_configs(config)
    assert [w["kv_cache"]["budget_bytes"] * 4 for w in workers.values()] == [config["kv_cache"]["budget_bytes"]] * 4
    colocated = config_of()
    assert worker_configs(colocated) == {"": colocated}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["topology=replicas", "topology.workers=0"], "topology.workers=0: must be a whole number of at least 1"),
        ([PAIR, "topology.prefill.workers=0"], "topology.prefill.workers=0: must be a whole number of at least 1"),
        ([PAIR, "topology.prefill.kv_share=1"], "topology.prefill.kv_share=1: must be a share of the KV budget"),
        ([PAIR, "topology.transfer=rdma"], "topology.transfer=rdma: must be one of shared_memory, distributed"),
        ([PAIR, "topology.transfer_timeout_s=0"], "topology.transfer_timeout_s=0: must be a number of seconds above 0"),
        ([PAIR, "batching=static"], "topology.decode.batching=continuous"),
        (["topology=replicas", "batching=static", "batching.emit=batch_end"], "batching.emit=batch_end"),
        ([PAIR, "kv_cache.budget=48tokens"], "buys"),
        ([PAIR, "topology.decode.max_num_seqs=1000"], "batching.max_num_seqs=1000"),
    ],
)
def test_an_arm_that_cannot_run_says_why(overrides: list[str], reason: str) -> None:
    reasons = validate_arm(config_of(*overrides))
    assert any(reason in why for why in reasons), reasons


def test_arms_that_can_run_have_no_reasons() -> None:
    for topology in ([PAIR], [PAIR, "topology.transfer=distributed"], ["topology=replicas"]):
        assert validate_arm(config_of(*topology)) == []


def test_held_blocks_stay_with_a_sequence_that_was_freed_until_they_are_let_go() -> None:
    kv = holding(PagedCache)(budget_bytes=64, bytes_per_token=1, max_model_len=64, block_size=16)
    for name in ("a", "b"):
        kv.begin(name, list(range(20)), 30)
        assert kv.allocate(name, 20)
        kv.commit(name, 20)
    blocks = kv.hold("a", 20)
    kv.free("a")
    kv.free("b")
    assert len(blocks) == 2 and kv.num_free_blocks == 2 and kv.held == [("a", 20)]
    kv.check_invariants()
    kv.begin("c", list(range(20)), 40)
    assert kv.allocate("c", 32) and not set(kv.block_table("c")) & set(blocks)
    kv.let_go("a")
    kv.let_go("a")
    kv.let_go("c")  # not held: nothing happens
    kv.check_invariants()
    assert kv.num_free_blocks == 2 and kv.held == []
