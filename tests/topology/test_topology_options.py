"""What a topology makes of an arm: each worker's share, and why an arm cannot run."""

from __future__ import annotations

import pytest
from topology_runs import config_of

from harness.arm import validate_arm
from harness.errors import BadInput
from harness.gpus import devices_of
from harness.study import compose_study
from impls.build import worker_configs
from impls.kv_cache.paged import PagedCache
from impls.topology.distributed import DistributedTransfer
from impls.topology.held_blocks import holding
from impls.topology.meeting import KEY

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


def test_arms_that_can_run_have_no_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    at = "topology.listen=192.168.0.10:29400"
    for topology in (
        [PAIR],
        [PAIR, "topology.transfer=distributed"],
        [PAIR, "topology.transfer=distributed", "topology.remote=[prefill0,decode0]", at],
        ["topology=replicas"],
        ["topology=replicas", "topology.remote=[replica1]", at],
    ):
        assert validate_arm(config_of(*topology)) == []


AT = "topology.listen=192.168.0.10:29400"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["topology.remote=[decode1]", AT], "topology.remote=[decode1]: must be names among prefill0, decode0"),
        (["topology.remote=[decode0,decode0]", AT], "topology.remote=[decode0,decode0]: names a worker twice"),
        (["topology.remote=[decode0]"], "topology.remote=[decode0]: needs topology.listen=<address>:<port> of this"),
        ([AT], "topology.listen=192.168.0.10:29400: nobody is to dial in there (topology.remote=[decode0])"),
        (["topology.remote=[decode0]", "topology.listen=host"], "topology.listen=host: must be <address>:<port>"),
        (["topology.remote=[decode0]", "topology.listen=0.0.0.0:1"], "topology.listen=0.0.0.0:1: must be the address"),
        (
            ["topology.remote=[decode0]", "topology.transfer=shared_memory", AT],
            "workers on other hosts see no memory of",
        ),
    ],
)
def test_who_cannot_dial_in_is_told_so(overrides: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    transfer = [] if any("transfer" in text for text in overrides) else ["topology.transfer=distributed"]
    reasons = validate_arm(config_of(PAIR, *transfer, *overrides))
    assert [why for why in reasons if reason in why] and len(reasons) == 1, reasons


def test_without_a_key_nobody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    (why,) = validate_arm(config_of("topology=replicas", "topology.remote=[replica1]", AT))
    assert why.startswith(f"topology=replicas: topology.remote=[replica1]: {KEY} is not set")


def test_what_is_elsewhere_takes_neither_memory_nor_a_gpu_of_this_host() -> None:
    arm = (PAIR, "topology.transfer=distributed", "topology.remote=[prefill0]", "topology.prefill.workers=2", AT)
    config = config_of(*arm)
    assert devices_of(config) == {"prefill1": "cpu", "decode0": "cpu"}
    config["device"]["name"] = "cuda"
    assert devices_of(config) == {"prefill1": "cuda:0", "decode0": "cuda:1"}
    assert DistributedTransfer.route("cpu", 1) == "network bandwidth between hosts"


def test_a_worker_is_not_waited_for_as_long_as_a_hang_lasts() -> None:
    arm = ("study=none", "model=tiny", PAIR, "topology.transfer_timeout_s=70")
    told = "topology.transfer_timeout_s=70: must be at most half of study.stall_s=120.0, .*; nearest: 60"
    with pytest.raises(BadInput, match=told):
        compose_study([*arm, "topology.transfer=distributed"])
    compose_study([*arm, "topology.transfer=distributed", "study.stall_s=140"])
    compose_study(arm)  # in shared memory nobody waits for it


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
