"""Real worker processes on the tiny model: same tokens as one engine, and an end to everything whoever is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest
from topology_runs import Run, config_of, gone, requests_of, run, shared_memory, target_of

from impls.engine import Engine
from impls.seams import Topology
from impls.topology.handles import ENDING_S

REQUESTS = requests_of(10)
PAIR = "topology=disaggregated"


@pytest.fixture(scope="module")
def colocated() -> Run:
    found = run(target_of(config_of()), REQUESTS)
    assert set(found.ends.values()) == {"length"}
    return found


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Any]:
    built = target_of(config_of(*request.param))
    yield built
    built.close()


def test_without_a_topology_the_target_is_an_engine_of_this_process() -> None:
    assert isinstance(target_of(config_of()), Engine)


@pytest.mark.parametrize(
    "target",
    [
        ("topology=replicas",),
        (PAIR,),
        (PAIR, "topology.prefill.workers=2", "topology.decode.workers=2"),
        (PAIR, "batching=static", "topology.decode.batching=continuous"),
        (PAIR, "kv_cache=contiguous"),
        (PAIR, "kv_cache=pow2"),
        (PAIR, "decoding=speculative", "proposer=draft_model"),
        (PAIR, "prefix=radix", "batching=chunked_prefill", "batching.max_num_batched_tokens=16"),
    ],
    indirect=True,
    ids=["replicas", "1p1d", "2p2d", "static prefill", "contiguous", "pow2", "draft model", "chunked and radix"],
)
def test_tokens_are_those_of_one_engine(target: Any, colocated: Run) -> None:
    found = run(target, REQUESTS)
    assert isinstance(target, Topology)
    assert found.ends == colocated.ends
    assert found.tokens == colocated.tokens
    for times in found.times.values():
        assert times == sorted(times)
    assert {stats.worker for stats in found.steps} == set(target.pid_of)
    assert all(free == total for free, total in target.call(_free_and_total))


def _free_and_total(engine: Engine) -> tuple[int, int]:
    engine.kv.check_invariants()
    return engine.kv.num_free_blocks, engine.kv.num_blocks


@pytest.mark.parametrize("target", [(PAIR,)], indirect=True)
def test_the_first_token_is_the_prefill_workers_and_nothing_is_computed_twice(target: Any) -> None:
    found = run(target, REQUESTS)
    by_worker = {name: [s for s in found.steps if s.worker == name] for name in ("prefill0", "decode0")}
    prompts = sum(len(request.prompt_token_ids) for request in REQUESTS)
    assert sum(s.prefill_tokens for s in by_worker["prefill0"]) == prompts
    assert sum(s.decode_tokens for s in by_worker["prefill0"]) == 0
    assert sum(s.prefill_tokens for s in by_worker["decode0"]) == 0
    assert sum(s.decode_tokens for s in by_worker["decode0"]) == sum(len(t) - 1 for t in found.tokens.values())


@pytest.mark.parametrize("target", [(PAIR,)], indirect=True)
def test_bytes_and_seconds_of_every_transfer_are_told_once(target: Any) -> None:
    found = run(target, REQUESTS)
    told: dict[str, tuple[int, float]] = {}
    for stats in found.steps:
        assert not told.keys() & stats.transfers.keys()
        told |= stats.transfers
        assert stats.swapped_in_bytes == 0
        assert bool(stats.transfers) <= (stats.worker == "decode0")
    block_bytes = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, positions, K/V heads, head_dim, FP32
    for request in REQUESTS:
        size, seconds = told[request.request_id]
        assert size == -(-len(request.prompt_token_ids) // 16) * block_bytes
        assert 0 < seconds < 1


# 16 blocks in all: 4 for prefill, two prompts; 12 for decode, in which four sequences of 4 blocks outgrow the room.
TIGHT = (PAIR, "model.max_model_len=64", "kv_cache.budget=512tokens", "topology.decode.max_num_seqs=4")
LONG = requests_of(10, output=37)


@pytest.mark.parametrize(
    "target",
    [TIGHT, (*TIGHT, "batching.preemption=swap")],
    indirect=True,
    ids=["recompute", "swap"],
)
def test_preemption_on_the_decode_side_changes_no_token(target: Any) -> None:
    alone = run(target_of(config_of("model.max_model_len=64")), LONG)
    found = run(target, LONG)
    assert sum(s.preempted for s in found.steps if s.worker == "decode0") > 0
    assert found.ends == alone.ends and found.tokens == alone.tokens


@pytest.mark.parametrize(
    "target",
    [TIGHT, (*TIGHT, "batching=static", "topology.decode.batching=continuous")],
    indirect=True,
    ids=["continuous", "static"],
)
def test_a_full_decode_pool_keeps_finished_prompts_where_they_are(target: Any) -> None:
    """And the prefill worker's records count what is held as used, nothing as reserved ahead of its time."""
    found = run(target, LONG)
    assert set(found.ends.values()) == {"length"}, found.errors
    waited = [s for s in found.steps if s.worker == "prefill0" and len(s.kv_reservations) > len(s.scheduled)]
    assert waited, "no prompt was held while another one was computed"
    for stats in found.steps:
        assert 0 <= stats.kv_free_tokens <= stats.kv_capacity_tokens
        assert stats.prefill_only == (stats.worker == "prefill0")
        for hold in stats.kv_reservations if stats.prefill_only else ():
            assert hold.used <= hold.reserved and hold.used == len(LONG[int(hold.request_id[1:])].prompt_token_ids)


@pytest.mark.parametrize("target", [TIGHT], indirect=True)
def test_what_can_never_run_is_rejected_before_it_begins(target: Any) -> None:
    cases = {
        "max_model_len is 64": requests_of(1, prompt=60, output=16),
        "max_model_len is 64 ": requests_of(1, prompt=2, output=100),
    }
    for reason, requests in cases.items():
        found = run(target, requests)
        assert found.ends == {"r0": "rejected"} and reason.strip() in found.errors["r0"]
        assert not found.steps


def test_a_request_that_only_the_decode_pool_cannot_hold_is_rejected() -> None:
    target = target_of(config_of(PAIR, "kv_cache.budget=1024tokens", "topology.prefill.kv_share=0.875"))
    try:
        found = run(target, requests_of(1, prompt=40, output=60))
        assert found.ends == {"r0": "rejected"} and "KV cache of a decode worker holds 64" in found.errors["r0"]
        assert run(target, requests_of(1, prompt=40, output=20)).ends == {"r0": "length"}
        assert run(target, requests_of(1, prompt=90, output=1)).ends == {"r0": "length"}, "it never gets there"
    finally:
        target.close()


@pytest.mark.parametrize("target", [(PAIR,)], indirect=True)
@pytest.mark.parametrize("victim", ["prefill0", "decode0"])
def test_kill_9_fails_the_requests_of_that_worker_and_nothing_hangs(target: Any, victim: str) -> None:
    many = requests_of(30, output=40)
    pids = target.pid_of
    killed: list[int] = []

    def kill(so_far: Run) -> None:
        busy = sum(len(tokens) for tokens in so_far.tokens.values()) >= 40
        if busy and not killed:
            os.kill(pids[victim], signal.SIGKILL)
            killed.append(pids[victim])

    found = run(target, many, kill)
    assert killed
    assert found.ends.keys() == {request.request_id for request in many}
    failed = [request_id for request_id, reason in found.ends.items() if reason == "error"]
    assert failed
    assert all(f"{victim} died (SIGKILL)" in found.errors[request_id] for request_id in failed)
    finished = [request_id for request_id, reason in found.ends.items() if reason == "length"]
    assert all(len(found.tokens[request_id]) == 40 for request_id in finished)
    if victim == "prefill0":
        assert finished, "what it had handed over goes on"
    assert dict(target.deaths) == {victim: "died (SIGKILL)"}
    late = run(target, requests_of(1, seed=9))
    assert late.ends == {"r0": "error"} and "no worker is left for it" in late.errors["r0"]
    with pytest.raises(RuntimeError, match=rf"worker {victim} died \(SIGKILL\)"):
        target.call(_free_and_total)


@pytest.mark.parametrize("target", [("topology=replicas",)], indirect=True)
def test_kill_9_of_a_replica_leaves_the_other_at_work(target: Any) -> None:
    os.kill(target.pid_of["replica0"], signal.SIGKILL)
    found = run(target, requests_of(8))
    reasons = list(found.ends.values())
    assert len(reasons) == 8 and "length" in reasons
    again = run(target, requests_of(4, seed=1))
    assert set(again.ends.values()) == {"length"}


@pytest.mark.parametrize("target", [("topology=replicas",)], indirect=True)
def test_the_answer_to_a_call_that_failed_is_not_taken_for_the_next_ones(target: Any) -> None:
    with pytest.raises(RuntimeError, match="worker replica1 died"):
        target.call(partial(_late_or_never, victim=target.pid_of["replica1"]))
    assert target.call(_pid, first_only=True) == [target.pid_of["replica0"]]


def _pid(engine: Engine) -> int:
    return os.getpid()


def _late_or_never(engine: Engine, victim: int) -> str:
    if os.getpid() == victim:
        os._exit(1)
    time.sleep(0.5)
    return "late"


def test_a_worker_that_takes_no_orders_is_given_up_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("impls.topology.workers.TAKING_S", 1)
    target = target_of(config_of("topology=replicas"))
    try:
        pid = target.pid_of["replica0"]
        os.kill(pid, signal.SIGSTOP)
        long = [replace(request, request_id=request.request_id.ljust(50_000)) for request in requests_of(20)]
        found = run(target, long)
        assert gone({"replica0": pid})
        assert dict(target.deaths) == {"replica0": "was given up: it took no orders for 1 s"}
        assert sum(end == "length" for end in found.ends.values()) >= 10 and len(found.ends) == 20
        assert set(found.errors.values()) == {"worker replica0 was given up: it took no orders for 1 s"}
    finally:
        target.close()


def test_close_in_the_middle_leaves_no_process_and_no_shared_memory() -> None:
    before = shared_memory()
    target = target_of(config_of(PAIR))
    pids = target.pid_of
    for request in requests_of(6, output=60):
        target.add_request(request)
    for _ in range(4):
        target.step(target.clock.now() + 5)
    began = time.monotonic()
    target.close()
    assert time.monotonic() - began < ENDING_S, "a worker had to be killed"
    assert gone(pids) and shared_memory() <= before


def test_a_target_that_nobody_closes_takes_its_workers_along() -> None:
    target = target_of(config_of(PAIR))
    pids = target.pid_of
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids.values())
    del target
    assert gone(pids)


@pytest.mark.parametrize("target", [TIGHT], indirect=True)
def test_aborted_requests_are_heard_of_no_more_and_give_up_their_blocks(target: Any) -> None:
    aborted = {"r1", "r4", "r5", "r9"}
    done: list[str] = []

    def abort(so_far: Run) -> None:
        if len(so_far.steps) >= 3 and not done:
            done.extend(aborted - so_far.ends.keys())
            for request_id in done:
                target.abort(request_id)
        assert not so_far.ends.keys() & set(done)

    found = run(target, LONG, abort)
    assert done and found.ends.keys() == {request.request_id for request in LONG} - set(done)
    assert all(free == total for free, total in target.call(_free_and_total))


@pytest.mark.parametrize("target", [(PAIR,)], indirect=True)
def test_the_id_of_an_aborted_request_may_be_used_again_at_once(target: Any) -> None:
    (first,), (second,) = requests_of(1, output=60), requests_of(1, output=12, seed=1)
    assert first.request_id == second.request_id
    alone = run(target_of(config_of()), [second])
    for _ in range(10):
        target.add_request(first)
        for _ in range(4):
            target.step(target.clock.now() + 5)
        time.sleep(0.02)  # more of it is on its way
        target.abort(first.request_id)
        assert run(target, [second]).tokens == alone.tokens
    assert all(free == total for free, total in target.call(_free_and_total))


def test_a_worker_that_cannot_be_built_says_why_and_leaves_none_behind() -> None:
    config = config_of(PAIR)
    config["topology"]["decode"]["max_num_seqs"] = 1000  # above max_num_batched_tokens, which `validate` would refuse
    children = len(psutil.Process().children(recursive=True))
    with pytest.raises(RuntimeError, match=r"worker decode0 failed: ValueError: batching\.max_num_seqs=1000"):
        target_of(config)
    for _ in range(100):
        if len(psutil.Process().children(recursive=True)) <= children + 2:  # the fork server and the tracker
            return
        time.sleep(0.02)
    raise AssertionError("a worker is left")


@pytest.mark.parametrize("target", [(PAIR,)], indirect=True)
def test_workers_show_the_runs_clock_after_it_was_restarted(target: Any) -> None:
    time.sleep(0.3)
    target.clock.restart()
    found = run(target, requests_of(3))
    assert all(0 <= stats.start_s <= stats.end_s < target.clock.now() for stats in found.steps)
