"""The GPUs of an arm: locked, held against its fit, watched and counted in its peaks. CUDA is a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_nvml import A, B, FakeNvml

import harness.block
import harness.gpus
import harness.system.workers
from harness.arm import resolve_study, validate_arm
from harness.block import device_locks
from harness.compose import compose_arm
from harness.engine_facts import EngineFacts
from harness.gpus import devices_of, gpu_memory, gpu_uuids
from harness.limits import Peaks, memory_free_bytes, memory_total_bytes
from harness.system.workers import WorkersUnderTest
from harness.telemetry import gpu as gpu_module
from harness.telemetry.gpu import GpuSource, gpu_source
from impls.build import WorkerBuilder
from impls.topology.distributed import DistributedTransfer

TWO_EACH = ("topology=disaggregated", "topology.transfer=distributed", "topology.prefill.workers=2")
REPLICAS = ("topology=replicas", "topology.workers=2")


def on_cuda(*overrides: str) -> dict[str, Any]:
    """Settled as where there is no GPU, then moved to one."""
    options = ("study=none", "device=cpu", "attention=sdpa", "workload/prompts=random", "kv_cache.budget=8192tokens")
    config = resolve_study({"arm": compose_arm([*options, *overrides])})["arm"]
    return {**config, "device": {**config["device"], "name": "cuda"}}


@pytest.fixture
def ask_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is asked in another process is asked in this one, of a fake CUDA, and noted."""
    asked: list[Any] = []

    def ask(function: Callable[[], Any]) -> Any:
        asked.append(function)
        return function()

    monkeypatch.setattr(harness.gpus, "in_another_process", ask)
    for cached in (gpu_uuids, gpu_memory):
        cached.cache_clear()
    yield asked
    for cached in (gpu_uuids, gpu_memory):
        cached.cache_clear()


def show_cuda(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    """As a CUDA of two GPUs does under this CUDA_VISIBLE_DEVICES."""
    both = {"0": A, "1": B, f"GPU-{A}": A, f"GPU-{B}": B}
    uuids = [A, B] if visible is None else [both[name] for name in visible.split(",")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (10 + i, 100 + i))
    gpu_uuids.cache_clear()


class Busy(Exception):
    pass


def refuse(said: str) -> None:
    raise Busy(said)


def test_a_gpu_has_one_lock_however_it_is_named(monkeypatch: pytest.MonkeyPatch, ask_here: list[Any]) -> None:
    for mine in (None, "0", f"GPU-{A}", "0,1"):
        show_cuda(monkeypatch, mine)
        with device_locks(["cuda"], Path("one"), refuse):
            for others in (None, "0", f"GPU-{A}"):
                show_cuda(monkeypatch, others)
                with pytest.raises(Busy, match="measured on cuda"), device_locks(["cuda"], Path("another"), refuse):
                    pass
            for others in ("1", f"GPU-{B}"):
                show_cuda(monkeypatch, others)
                with device_locks(["cuda"], Path("another"), refuse), device_locks(["cpu"], Path("third"), refuse):
                    pass
    assert len(ask_here) > 4, "asked in this process"


@pytest.mark.parametrize("visible", [None, "1,0"])
def test_all_gpus_of_a_trial_are_locked_in_one_order(
    monkeypatch: pytest.MonkeyPatch, ask_here: list[Any], visible: str | None
) -> None:
    taken: list[str] = []

    @contextmanager
    def hold(path: Path, *given: Any, **options: Any) -> Iterator[None]:
        taken.append(path.stem.partition("-cuda-")[2])
        yield

    monkeypatch.setattr(harness.block, "held", hold)
    show_cuda(monkeypatch, visible)
    with device_locks(["cuda:1", "cuda:0", "cuda"], Path("run"), refuse):
        assert taken == [A, B]


def test_memory_is_that_of_the_gpu_that_is_named(monkeypatch: pytest.MonkeyPatch, ask_here: list[Any]) -> None:
    show_cuda(monkeypatch, None)
    for device, number in (("cuda", 0), ("cuda:1", 1), ("cuda:0", 0)):
        assert (memory_free_bytes(device), memory_total_bytes(device)) == (10 + number, 100 + number)
    assert len(ask_here) == 2  # once of each: a study's arms are to find the same


# --- which device a worker has ----------------------------------------------------------------------------------------


def test_workers_share_the_first_gpu_unless_nccl_needs_one_for_each() -> None:
    assert devices_of(on_cuda("model=tiny")) == {"": "cuda"}
    assert devices_of(on_cuda("model=tiny", *REPLICAS)) == {"replica0": "cuda", "replica1": "cuda"}
    config = on_cuda("model=tiny", *TWO_EACH)
    assert devices_of(config) == {"prefill0": "cuda:0", "prefill1": "cuda:1", "decode0": "cuda:2"}
    assert devices_of({**config, "device": {"name": "cpu"}}) == dict.fromkeys(devices_of(config), "cpu")


def test_it_is_the_gpu_that_a_worker_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_cuda("model=tiny", *TWO_EACH)
    workers = {name: {"device": {"name": "cuda"}} for name in devices_of(config)}
    transfer = DistributedTransfer({n: workers[n] for n in ("prefill0", "prefill1")}, ["decode0"], WorkerBuilder(), 1.0)

    class Taken(Exception):
        pass

    def take(device: int) -> None:
        raise Taken(device)

    monkeypatch.setattr(torch.cuda, "set_device", take)
    for name, device in devices_of(config).items():
        with pytest.raises(Taken) as taken:
            transfer.open(name)
        assert f"cuda:{taken.value.args[0]}" == device


@pytest.mark.parametrize(
    ("overrides", "needed", "asked"),
    [
        ((), [], {"cuda"}),
        (REPLICAS, ["needs 286 GB, has 160 GB"], {"cuda"}),
        (TWO_EACH, [], {"cuda:0", "cuda:1", "cuda:2"}),
    ],
)
def test_each_gpu_has_to_hold_the_workers_that_share_it(
    monkeypatch: pytest.MonkeyPatch, overrides: Sequence[str], needed: list[str], asked: set[str]
) -> None:
    """70 billion weights of two bytes each, on GPUs of 160 GB."""
    seen: list[str] = []

    def memory(device: str) -> int:
        seen.append(device)
        return 160 * 10**9

    monkeypatch.setattr("harness.limits.memory_total_bytes", memory)
    monkeypatch.setattr(DistributedTransfer, "unsupported", staticmethod(lambda *_: []))
    reasons = validate_arm(on_cuda("model=llama3_70b", "model.max_model_len=4096", *overrides))
    assert [why for why in reasons if why.startswith("needs")] == needed
    assert set(seen) == asked


# --- what is recorded of them -----------------------------------------------------------------------------------------


class FakeWorkers:
    """Each holds memory on the GPUs of ``held``; a call runs here, as if in each of them."""

    alike, deaths, transfer_route, pids, remote = True, {}, None, (), ()

    def __init__(self, held: Sequence[Mapping[int, str]]) -> None:
        self.held, self.current = held, 0

    def call(self, function: Callable[[Any], Any], *, first_only: bool = False) -> list[Any]:
        answers = []
        for worker in range(1 if first_only else len(self.held)):
            self.current = worker
            engine = SimpleNamespace(executor=SimpleNamespace(model=SimpleNamespace(method="the workers' own")))
            answers.append(function(engine))
        return answers


def system_of(monkeypatch: pytest.MonkeyPatch, held: Sequence[Mapping[int, str]]) -> WorkersUnderTest:
    def peaks(device: str, method: Any, kept_in: Path) -> Peaks:
        assert (device, method, workers.current) == ("cuda", "the workers' own", 0)
        return Peaks(100.0, None, "measured")

    workers: Any = FakeWorkers(held)
    monkeypatch.setattr(harness.system.workers, "peaks", peaks)
    monkeypatch.setattr(harness.system.workers, "cuda_uuids", lambda: held[workers.current])
    monkeypatch.setattr(harness.system.workers, "engine_facts", lambda *_, **__: EngineFacts({}, [], 1, False, {}))
    return WorkersUnderTest(workers, on_cuda("model=tiny", *REPLICAS), SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("held", "gpus"),
    [([{0: A}, {1: B}], 2), ([{0: A}, {0: A}], 1), ([{0: A}, {1: B}, {0: A}], 2)],
)
def test_the_peak_is_that_of_all_gpus_each_counted_once(
    monkeypatch: pytest.MonkeyPatch, held: Sequence[Mapping[int, str]], gpus: int
) -> None:
    system = system_of(monkeypatch, held)
    assert system.gpus() == held
    assert system.peaks() == Peaks(gpus * 100.0, None, "measured")


def test_every_gpu_of_the_workers_is_watched_and_our_own_processes_are_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids = [SimpleNamespace(pid=pid) for pid in (11, 12, 13)]
    nvml = FakeNvml(answers={"nvmlDeviceGetComputeRunningProcesses": pids})
    monkeypatch.setattr(gpu_module, "GpuSource", lambda real, *given, **options: GpuSource(nvml, *given, **options))
    source = gpu_source(system_of(monkeypatch, [{0: A}, {1: B}, {0: A}]).gpus())
    assert source is not None
    others = {reading.source: reading.value for reading in source.read() if reading.name == "other_processes"}
    assert others == {"gpu0": 1.0, "gpu1": 2.0}
