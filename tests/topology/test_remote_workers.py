"""Workers that dial in from other hosts, played by other processes of this one: same tokens, same bytes, same ends."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from joiners import SECRET, Joiner, free_port, joiner
from topology_runs import Run, config_of, gone, requests_of, run, target_of

from impls.build import WorkerBuilder
from impls.topology import meeting
from impls.topology.meeting import KEY

REQUESTS = requests_of(10)
PAIR = ("topology=disaggregated", "topology.transfer=distributed", "topology.remote=[decode0]")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)


@pytest.fixture(scope="module")
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[Joiner]:
    """One command for all of the trials below, each with the next worker that it starts."""
    with joiner(tmp_path_factory.mktemp("decoder"), address, "decode0") as started:
        yield started


@pytest.fixture(scope="module")
def alone() -> Run:
    return run(target_of(config_of()), REQUESTS)


def test_tokens_and_bytes_are_those_of_one_host_trial_after_trial(decoder: Joiner, address: str, alone: Run) -> None:
    workers = []
    for _ in range(2):
        target = target_of(config_of(*PAIR, f"topology.listen={address}"))
        try:
            workers.append(decoder.worker().pid)
            began = target.clock.now()
            found = run(target, REQUESTS)
            assert found.tokens == alone.tokens and found.ends == alone.ends
            block_bytes = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, positions, K/V heads, head_dim, FP32
            told = {name: size for stats in found.steps for name, (size, _) in stats.transfers.items()}
            assert told == {r.request_id: -(-len(r.prompt_token_ids) // 16) * block_bytes for r in REQUESTS}
            assert {s.worker for s in found.steps if s.decode_tokens} == {"decode0"}
            assert list(target.pid_of) == ["prefill0"], "only processes of this host have an id here"
            assert target.transfer_route == "network bandwidth between hosts"
            assert 0 < target.clock_errors()["decode0"] < 0.1
            for name, times in found.times.items():
                assert began < times[0] and times == sorted(times) and times[-1] < target.clock.now(), name
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", target._transfer._port), timeout=5)
        finally:
            target.close()
        assert gone({"decode0": workers[-1]})
    assert workers[0] != workers[1], "the second trial began with the memory of the first"


def test_kill_9_over_there_fails_what_it_had_and_the_next_trial_finds_another(
    decoder: Joiner, address: str, alone: Run
) -> None:
    target = target_of(config_of(*PAIR, f"topology.listen={address}"))
    killed: list[int] = []

    def kill(so_far: Run) -> None:
        if not killed and sum(map(len, so_far.tokens.values())) >= 40:
            killed.append(decoder.worker().pid)
            psutil.Process(killed[0]).kill()

    try:
        found = run(target, requests_of(20, output=40), kill)
        assert killed and len(found.ends) == 20 and found.errors
        why = "was lost, on another host: its connection was closed"
        assert dict(target.deaths) == {"decode0": why}
        assert set(found.errors.values()) <= {f"worker decode0 {why}", f"no worker is left for it: decode0 {why}"}
        assert list(target.clock_errors()) == ["decode0"], "what was known of its clock is still known"
    finally:
        target.close()
    decoder.waits_for("the worker has ended (SIGKILL)")
    again = target_of(config_of(*PAIR, f"topology.listen={address}"))
    try:
        assert run(again, REQUESTS).tokens == alone.tokens
    finally:
        again.close()


def test_other_weights_over_there_are_told_before_anything_is_computed(
    decoder: Joiner, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerBuilder, "fingerprint", lambda self, config: "mine")
    told = r"^worker decode0 failed: ValueError: the model's fingerprint is \S+ there, mine here: other weights$"
    with pytest.raises(RuntimeError, match=told):
        target_of(config_of(*PAIR, f"topology.listen={address}"))


@pytest.mark.slow
def test_replicas_with_one_of_them_elsewhere(tmp_path: Path, alone: Run) -> None:
    address = f"127.0.0.1:{free_port()}"
    with joiner(tmp_path, address, "replica1") as started:
        target = target_of(config_of("topology=replicas", "topology.remote=[replica1]", f"topology.listen={address}"))
        try:
            found = run(target, REQUESTS)
            assert found.tokens == alone.tokens and found.ends == alone.ends
            assert {stats.worker for stats in found.steps} == {"replica0", "replica1"}
            worker = started.worker().pid
            started.process.send_signal(
                signal.SIGINT
            )  # a terminal tells its worker too, in vain
            assert started.process.wait(20) == 130 and gone({"replica1": worker})
            late = run(target, requests_of(8, seed=9))
            assert set(late.errors.values()) <= {"worker replica1 was lost, on another host: its connection was closed"}
            assert len(late.ends) == 8 and list(target.deaths) == ["replica1"]
        finally:
            target.close()


def test_ctrl_c_ends_the_waiting_for_a_router(tmp_path: Path) -> None:
    with joiner(tmp_path, f"127.0.0.1:{free_port()}", "decode0") as started:
        started.waits_for("waiting for a router at 127.0.0.1:")
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(20) == 130
    assert "Traceback" not in started.said


def test_nobody_dials_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "WAITING_S", 0.3)
    elsewhere, children = f"127.0.0.1:{free_port()}", len(psutil.Process().children(recursive=True))
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=rf"^worker decode0 has not dialled in at topology.listen={elsewhere} within"
    ):
        target_of(config_of(*PAIR, f"topology.listen={elsewhere}"))
    assert time.monotonic() - began < 20
    assert len(psutil.Process().children(recursive=True)) == children, "a worker was started for nothing"
