"""Both ways of handing over bring the same bytes; by torch.distributed, who asks in vain is told why, and in time."""

from __future__ import annotations

import copy
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from topology_runs import Run, config_of, gone, requests_of, run, shared_memory, target_of
from torch.distributed.distributed_c10d import PrefixStore

from impls.engine import Engine
from impls.kv_cache.storage import KVStorage
from impls.request import Request, SamplingParams, Sequence
from impls.topology.disaggregated import TRANSFERS
from impls.topology.distributed import DistributedTransfer
from impls.topology.link import CONSUMER, PRODUCER, Link
from impls.topology.shared_memory import SharedMemoryTransfer
from impls.topology.transfer import LOOPBACK, KVTransfer, TransferError

OVER = ("topology=disaggregated", "topology.transfer=distributed")
REQUESTS = requests_of(10)
SHAPE = (2, 6, 4, 2, 8)  # layers, blocks, block size, K/V heads, head_dim
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pools:
    """What a transfer needs of an `EngineBuilder`."""

    dtype: torch.dtype

    def storage_bytes(self, config: Any) -> int:
        return KVStorage.bytes_needed(*SHAPE, self.dtype)

    def storage(self, config: Any, memory: torch.Tensor) -> KVStorage:
        return KVStorage(*SHAPE, self.dtype, memory.device, memory)


class Absent(Pools):
    """As one whose process stands still for a second, once it is asked."""

    def storage(self, config: Any, memory: torch.Tensor) -> KVStorage:
        storage = super().storage(config, memory)

        def export(blocks: Seq[int]) -> torch.Tensor:
            time.sleep(1.0)
            return KVStorage.export(storage, blocks)

        storage.export = export  # type: ignore[method-assign]
        return storage


@dataclass
class Joined:
    """A producer `p` and a consumer `c` of one process."""

    made: KVTransfer
    pool: KVStorage
    consumer: KVTransfer


@pytest.fixture
def join() -> Iterator[Callable[..., Joined]]:
    """`meet`, and the end of what waits for its consumers: a thread in there would not survive this process's end."""
    made: list[Joined] = []

    def join(*arguments: Any, **options: Any) -> Joined:
        made.append(meet(*arguments, **options))
        return made[-1]

    yield join
    for each in made:
        getattr(each.consumer, "_links", {}).clear()


def meet(kind: type[KVTransfer], pools: Any, timeout_s: float = 30.0) -> Joined:
    made = kind({"p": {"device": {"name": "cpu"}}}, ["c"], pools, timeout_s)
    producer, consumer = copy.copy(made), copy.copy(made)
    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(producer.open, "p")
        assert consumer.open("c") is None
        memory = opened.result()
    assert memory is not None
    return Joined(made, pools.storage({}, memory), consumer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", TRANSFERS.values(), ids=TRANSFERS)
def test_blocks_arrive_as_they_were_scales_included(join: Any, kind: type[KVTransfer], dtype: torch.dtype) -> None:
    joined = join(kind, Pools(dtype))
    random = torch.Generator().manual_seed(0)
    slots = torch.arange(SHAPE[1] * SHAPE[2])
    for layer in range(SHAPE[0]):
        k, v = (torch.randn(len(slots), *SHAPE[3:], generator=random) for _ in range(2))
        joined.pool.write(layer, k, v, slots)
    own = KVStorage(*SHAPE, dtype, CPU)
    own.make_resident()
    for blocks, into in (((4, 1), (0, 5)), ((3,), (2,))):
        sent = joined.pool.export(blocks)
        assert joined.consumer.fetch("p", blocks, own, into) == sent.nbytes > 0
        assert torch.equal(own.export(into).view(torch.uint8), sent.view(torch.uint8))
    assert not own.export((1, 3, 4)).view(torch.uint8).any(), "other blocks were written"


def test_who_does_not_answer_is_given_up_after_the_time_out_and_asked_no_more(join: Any) -> None:
    joined = join(DistributedTransfer, Absent(torch.float32), timeout_s=0.5)
    own = KVStorage(*SHAPE, torch.float32, CPU)
    own.make_resident()
    joined.pool.write(0, *torch.ones(2, 1, *SHAPE[3:]), torch.tensor([0]))
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(TransferError, match="Timed out waiting 500ms"):
            joined.consumer.fetch("p", (0,), own, (0,))
    assert time.monotonic() - began < 0.4
    time.sleep(1.0)  # until it would have answered
    assert not own.export(range(SHAPE[1])).any()


class Lazy:
    """As NCCL: what joins the ends is made with their first message, and each waits in it until the other comes."""

    eager: Any = dist.ProcessGroupGloo
    create_device, _Options = eager.create_device, eager._Options

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._made: Any = None

    def _group(self) -> Any:
        self._made = self._made or self.eager(*self._arguments)
        return self._made

    def send(self, *message: Any) -> Any:
        return self._group().send(*message)

    def recv(self, *message: Any) -> Any:
        return self._group().recv(*message)


def test_the_first_transfer_has_no_more_time_than_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("impls.topology.link.MEETING", timedelta(seconds=5))
    monkeypatch.setattr(dist, "ProcessGroupGloo", Lazy)
    store = PrefixStore("p-c", dist.HashStore())
    with ThreadPoolExecutor(2) as threads:
        limit = timedelta(seconds=0.2)
        _, consumer = threads.map(lambda rank: Link(store, rank, "cpu", limit, LOOPBACK), (PRODUCER, CONSUMER))
    began = time.monotonic()
    with pytest.raises(TransferError, match="Timed out waiting 200ms"):
        consumer.receive(torch.empty(8))  # and the producer does nothing
    assert time.monotonic() - began < 2


def test_who_never_comes_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gone_away = threading.Event()

    class Endless(Lazy):
        def _group(self) -> Any:
            gone_away.wait(10)
            raise RuntimeError("nobody came")

    monkeypatch.setattr("impls.topology.link.MEETING", timedelta(seconds=0.2))
    monkeypatch.setattr(dist, "ProcessGroupGloo", Endless)
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"no connection was made within 0\.2 s"):
        Link(PrefixStore("p-c", dist.HashStore()), CONSUMER, "cpu", timedelta(seconds=30), LOOPBACK)
    assert time.monotonic() - began < 5
    gone_away.set()


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Any]:
    built = target_of(config_of(*request.param))
    yield built
    built.close()


def one_engine(*overrides: str, requests: list[Request] = REQUESTS) -> Run:
    return run(target_of(config_of(*overrides)), requests)


@pytest.mark.parametrize("target", [OVER], indirect=True)
def test_tokens_bytes_and_seconds_over_sockets(target: Any) -> None:
    found, alone = run(target, REQUESTS), one_engine()
    assert found.tokens == alone.tokens and found.ends == alone.ends
    told = [transfer for stats in found.steps for transfer in stats.transfers.items()]
    block_bytes = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, positions, K/V heads, head_dim, FP32: as in shared memory
    assert {name: size for name, (size, _) in told} == {
        request.request_id: -(-len(request.prompt_token_ids) // 16) * block_bytes for request in REQUESTS
    }
    assert len(told) == len(REQUESTS) and all(0 < seconds < 5 for _, (_, seconds) in told)
    assert sum(s.prefill_tokens for s in found.steps if s.worker == "decode0") == 0, "a prompt was computed again"
    assert target.call(_held) == [0, 0]


def _held(engine: Engine) -> int:
    """Blocks that something holds."""
    engine.kv.check_invariants()
    return engine.kv.num_blocks - engine.kv.num_free_blocks


@pytest.mark.parametrize(
    "target", [(*OVER, "kv_dtype=int8", "topology.prefill.workers=2", "topology.decode.workers=2")], indirect=True
)
def test_every_prefill_worker_reaches_every_decode_worker_in_8_bit_too(target: Any) -> None:
    found = run(target, REQUESTS)
    assert found.tokens == one_engine("kv_dtype=int8").tokens
    assert {stats.worker for stats in found.steps} == set(target.pid_of)


MANY = requests_of(24, output=20)
TWO_TO_ONE = (*OVER, "topology.prefill.workers=2")


def _known(engine: Engine) -> dict[str, int]:
    """How many positions of each prompt another one would not have to compute."""
    return {request.request_id: engine.kv.num_cached_tokens(request.prompt_token_ids) for request in MANY}


OTHERS = {f"r{i}" for i in range(1, len(MANY), 2)}  # what the second of two prefill workers gets


def all_begun(so_far: Run) -> bool:
    """Every prompt is computed, and most of them wait until the decode worker has room."""
    return len(so_far.tokens) == len(MANY)


class Stop:
    """Between the steps of a run: SIGSTOP of a worker, once it is time."""

    def __init__(self, target: Any, worker: str, is_time: Callable[[Run], bool]) -> None:
        self.pid, self._is_time, self.done = target.pid_of[worker], is_time, False

    def __call__(self, so_far: Run) -> None:
        if not self.done and self._is_time(so_far):
            os.kill(self.pid, signal.SIGSTOP)
            self.done = True


@pytest.mark.parametrize("target", [(*TWO_TO_ONE, "topology.transfer_timeout_s=300")], indirect=True)
def test_kill_9_of_a_prefill_worker_while_it_is_asked_fails_what_it_had_alone(target: Any) -> None:
    """It stands still first, so that the decode worker is waiting for its answer when it dies."""
    pid = target.pid_of["prefill0"]
    stopped: list[float] = []
    killed: list[float] = []

    def kill(so_far: Run) -> None:
        if not stopped and all_begun(so_far):
            os.kill(pid, signal.SIGSTOP)
            stopped.append(time.monotonic())
        elif stopped and not killed and time.monotonic() - stopped[0] > 1:
            assert not so_far.errors
            os.kill(pid, signal.SIGKILL)
            killed.append(time.monotonic())

    found = run(target, MANY, kill)
    assert killed and dict(target.deaths) == {"prefill0": "died (SIGKILL)"}
    assert found.errors and not found.errors.keys() & OTHERS
    assert all(re.search("could not be had from worker prefill0: .*peer", why) for why in found.errors.values())
    alone = one_engine(requests=MANY)
    for name in found.ends.keys() - found.errors.keys():
        assert found.ends[name] == "length" and found.tokens[name] == alone.tokens[name]
    late = run(target, requests_of(2, seed=9))
    assert set(late.ends.values()) == {"length"}


@pytest.mark.parametrize("target", [(*TWO_TO_ONE, "topology.transfer_timeout_s=2", "prefix=radix")], indirect=True)
def test_a_prefill_worker_that_stands_still_fails_what_it_had_and_is_given_up(target: Any) -> None:
    stop = Stop(target, "prefill0", all_begun)
    found = run(target, MANY, stop)
    assert stop.done
    assert found.errors and all("from worker prefill0: Timed out waiting 2000ms" in e for e in found.errors.values())
    assert found.ends.keys() == {request.request_id for request in MANY} and not found.errors.keys() & OTHERS
    rows = [name for stats in found.steps if stats.worker == "decode0" for name in stats.scheduled]
    assert all(rows.count(name) == 1 for name in found.errors), "it went on without keys and values"
    assert gone({"prefill0": stop.pid}) and list(target.deaths) == ["prefill0"]
    assert target.deaths["prefill0"].startswith("was given up: decode0 gets nothing from it (Timed out")
    late = run(target, requests_of(6, seed=9))
    assert set(late.ends.values()) == {"length"} and {s.worker for s in late.steps} == {"prefill1", "decode0"}
    target._names = ["prefill1", "decode0"]  # who can still be called
    assert target.call(_held) == [0, 0]
    known = target.call(_known)[-1]
    assert not any(known[name] for name in found.errors), "the decode worker would share what it never got"


@pytest.mark.parametrize("target", [(*OVER, "topology.transfer_timeout_s=1")], indirect=True)
def test_the_only_prefill_worker_stands_still_and_every_request_ends_with_a_reason(target: Any) -> None:
    """Those too that it has not begun, and nobody has to wait for it to go on."""
    stop = Stop(target, "prefill0", lambda so_far: len(so_far.tokens) >= 6)
    found = run(target, MANY, stop)
    assert stop.done and found.ends.keys() == {request.request_id for request in MANY}
    given_up = "worker prefill0 was given up: decode0 gets nothing from it (Timed out waiting 1000ms"
    assert any(why.startswith(given_up) for why in found.errors.values())
    began = time.monotonic()
    late = run(target, requests_of(2, seed=9))
    assert all(why.startswith("no worker is left for it: prefill0 was given up") for why in late.errors.values())
    assert len(late.errors) == 2 and time.monotonic() - began < 0.5
    with pytest.raises(RuntimeError, match="worker prefill0 was given up"):
        target.call(_held)


@pytest.mark.slow
@pytest.mark.parametrize("target", [(*OVER, "topology.decode.workers=2")], indirect=True)
def test_kill_9_of_a_decode_worker_leaves_the_prefill_worker_and_the_other_at_work(target: Any) -> None:
    killed: list[int] = []

    def kill(so_far: Run) -> None:
        if not killed and sum(map(len, so_far.tokens.values())) >= 40:
            os.kill(target.pid_of["decode0"], signal.SIGKILL)
            killed.append(1)

    found = run(target, MANY, kill)
    assert found.errors and set(found.errors.values()) == {"worker decode0 died (SIGKILL)"}
    alone = one_engine(requests=MANY)
    finished = [name for name, end in found.ends.items() if end == "length"]
    assert finished and all(found.tokens[name] == alone.tokens[name] for name in finished)
    late = run(target, requests_of(4, seed=9))
    assert set(late.ends.values()) == {"length"}


def test_close_in_the_middle_leaves_no_process_no_memory_and_nobody_listening() -> None:
    before = shared_memory()
    target = target_of(config_of(*OVER))
    pids, port = target.pid_of, target._transfer._port
    socket.create_connection((LOOPBACK, port), timeout=5).close()
    for request in requests_of(6, output=60):
        target.add_request(request)
    for _ in range(4):
        target.step(target.clock.now() + 5)
    target.close()
    assert gone(pids) and shared_memory() <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port), timeout=5)


def test_who_is_rejected_where_it_was_to_go_on_leaves_nothing_to_be_fetched() -> None:
    engine = target_of(config_of())
    long = Sequence(Request("long", tuple(range(126)), SamplingParams(max_tokens=50)), [*range(126), 7])
    engine.resume(long, lambda storage, blocks: pytest.fail("fetched"))
    (emission,) = engine.step(0.0).emissions
    assert emission.finish_reason == "rejected"
    with pytest.raises(KeyError):
        engine.swap.swap_in("long", [0])


def test_gpus_need_nccl_and_one_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of machines that are not this one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert DistributedTransfer.unsupported("cuda", 2) == []
    (why,) = DistributedTransfer.unsupported("cuda", 3)
    assert "NCCL needs a GPU for each of 3 workers, and here are 2" in why
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert "this torch was built without NCCL" in DistributedTransfer.unsupported("cuda", 2)[0]
    assert SharedMemoryTransfer.unsupported("cpu", 9) == [] != SharedMemoryTransfer.unsupported("cuda", 2)
