"""NVML at the binding's edge: a fake `pynvml` that answers, refuses and fails function by function.

The fake takes its constants, structures and errors from the real binding, and refuses a call that the binding does
not have or does not take, so a misspelt name fails here as it would on a GPU.
"""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from harness.telemetry import gpu as gpu_module
from harness.telemetry.devices import cuda_uuids
from harness.telemetry.gpm import METRICS, Gpm
from harness.telemetry.gpu import GpuSource, gpu_source

A, B = "aaaaaaaa-0000-0000-0000-000000000000", "bbbbbbbb-0000-0000-0000-000000000000"
MIG = "cccccccc-0000-0000-0000-000000000000"
BOTH = {0: A, 1: B}
ULL, UINT = 2**64 - 1, 2**32 - 1
GPM_VALUES = {"NVML_GPM_METRIC_SM_UTIL": 71.5, "NVML_GPM_METRIC_PCIE_TX_PER_SEC": 3.0}
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93, memory=41),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=7_000_000_000),
    "nvmlDeviceGetPowerUsage": 312_500,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetTemperatureV": 62,
    "nvmlDeviceGetCurrentClocksEventReasons": 4,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 8,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)],
    "nvmlDeviceGetPcieThroughput": 2_500,
}
FIELDS = (
    *("utilization_percent", "memory_busy_percent", "memory_used_bytes", "power_w", "energy_j", "sm_clock_hz"),
    *("memory_clock_hz", "temperature_c", "throttle_reasons", "other_processes"),
    *(metric.name for metric in METRICS),
)


class FakeNvml:
    """Two GPUs. ``failures``: error class name by function, or by (function, handle); it answers ``answers`` besides.

    Handles are the UUIDs themselves, with their prefix. ``mig``: the UUIDs of the MIG instances of GPU `A`, by index.
    """

    def __init__(
        self,
        failures: Mapping[Any, str] | None = None,
        answers: Mapping[str, Any] | None = None,
        gpm: bool = False,
        mig: Mapping[int, str] | None = None,
    ) -> None:
        self.failures, self.answers = dict(failures or {}), {**ANSWERS, **(answers or {})}
        self.gpm, self.mig = gpm, dict(mig or {})
        self.open = self.sampled = 0
        self.allocated: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)  # AttributeError where the binding has no such name
        if not name.startswith("nvml"):
            return real

        def call(*arguments: Any) -> Any:
            inspect.signature(real).bind(*arguments)
            self.calls.append((name, *arguments))
            handle = arguments[0] if arguments and isinstance(arguments[0], str) else None
            failure = self.failures.get(name) or self.failures.get((name, handle))
            if failure:
                raise getattr(pynvml, failure)()
            special = getattr(self, f"_{name}", None)
            return special(*arguments) if special else self.answers[name]

        return call

    def _nvmlInit(self) -> None:
        self.open += 1

    def _nvmlShutdown(self) -> None:
        self.open -= 1

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (f"GPU-{A}", f"GPU-{B}", *(f"MIG-{u}" for u in self.mig.values())):
            raise pynvml.NVMLError_NotFound()
        return uuid

    def _nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [int(bool(self.mig) and handle == f"GPU-{A}"), 0]

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index not in self.mig:
            raise pynvml.NVMLError_NotFound()
        return f"MIG-{self.mig[index]}"

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return f"GPU-{A}"

    def _nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        return 40 + next(index for index, uuid in self.mig.items() if handle == f"MIG-{uuid}")

    def _nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self.gpm))

    def _nvmlGpmSampleAlloc(self) -> Any:
        sample = ctypes.cast(ctypes.create_string_buffer(8), pynvml.c_nvmlGpmSample_t)
        self.allocated.append(sample)
        return sample

    def _nvmlGpmSampleFree(self, sample: Any) -> None:
        self.allocated.remove(sample)

    def _take(self, sample: Any) -> None:
        self.sampled += 1
        ctypes.cast(sample, ctypes.POINTER(ctypes.c_int64))[0] = self.sampled

    def _nvmlGpmSampleGet(self, handle: str, sample: Any) -> None:
        self._take(sample)

    def _nvmlGpmMigSampleGet(self, handle: str, instance: int, sample: Any) -> None:
        self._take(sample)

    def _nvmlGpmMetricsGet(self, question: Any) -> None:
        assert question.version == 1
        first, second = (
            ctypes.cast(sample, ctypes.POINTER(ctypes.c_int64))[0] for sample in (question.sample1, question.sample2)
        )
        assert 0 < first < second == self.sampled
        known = {getattr(pynvml, name): value for name, value in self.answers.get("gpm", GPM_VALUES).items()}
        for metric in question.metrics[: question.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in known else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = known.get(metric.metricId, 0.0)


def source_of(nvml: FakeNvml, uuids: Mapping[int, str] = BOTH, environment: Mapping[str, str] | None = None) -> Any:
    return GpuSource(nvml, uuids, environment or {})


def values(nvml: FakeNvml, **arguments: Any) -> dict[tuple[str, str], float | None]:
    return {(r.source, r.name): r.value for r in source_of(nvml, **arguments).read()}


def test_fields_and_units() -> None:
    read = values(FakeNvml())
    assert set(read) == {(gpu, name) for gpu in ("gpu0", "gpu1") for name in FIELDS}
    assert read["gpu0", "utilization_percent"] == 93
    assert read["gpu1", "memory_busy_percent"] == 41
    assert read["gpu1", "memory_used_bytes"] == 7e9
    assert read["gpu1", "power_w"] == 312.5
    assert read["gpu0", "energy_j"] == 5000.0
    assert read["gpu0", "sm_clock_hz"] == read["gpu0", "memory_clock_hz"] == 1980e6
    assert read["gpu0", "temperature_c"] == 61
    assert read["gpu0", "throttle_reasons"] == 4
    assert read["gpu0", "pcie_sent_bytes_per_s"] == read["gpu0", "pcie_received_bytes_per_s"] == 2.5e6
    assert all(read["gpu0", name] is None for name in ("sm_active_percent", "dram_active_percent"))


REFUSALS = ("NVMLError_NotSupported", "NVMLError_NoPermission", "NVMLError_NotFound", "NVMLError_GpuIsLost")


@pytest.mark.parametrize("error", [*REFUSALS, "NVMLError_FunctionNotFound", "NVMLLibraryMismatchError"])
@pytest.mark.parametrize("function", sorted(ANSWERS))
def test_a_refused_field_is_null_and_the_others_stay(function: str, error: str) -> None:
    """The mismatch error is what the binding makes of a driver that lacks a function; it is no NVMLError."""
    full, partial = values(FakeNvml()), values(FakeNvml({function: error}))
    assert set(partial) == set(full)
    changed = {name for gpu, name in full if partial[gpu, name] != full[gpu, name]}
    old_name = function in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksThrottleReasons")
    assert bool(changed) != old_name  # those are asked only where the usual name is missing
    renamed = {"temperature_c": 62.0, "throttle_reasons": 8.0} if error == "NVMLError_FunctionNotFound" else {}
    assert all(partial[gpu, name] == renamed.get(name) for gpu, name in full if name in changed)


def test_a_driver_that_answers_nothing_gives_nulls_only() -> None:
    assert set(values(FakeNvml(dict.fromkeys(ANSWERS, "NVMLError_NotSupported"))).values()) == {None}


def test_one_gpu_that_refuses_leaves_the_other() -> None:
    nvml = FakeNvml({(function, f"GPU-{A}"): "NVMLError_NotSupported" for function in ANSWERS})
    read, full = values(nvml), values(FakeNvml())
    assert all(read["gpu0", name] is None and read["gpu1", name] == full["gpu1", name] for name in FIELDS)


def test_a_gpu_that_cannot_even_be_opened_leaves_the_other() -> None:
    read = values(FakeNvml({("nvmlDeviceGetHandleByUUID", f"GPU-{A}"): "NVMLError_NoPermission"}))
    assert {gpu for gpu, _ in read} == {"gpu1"}


@pytest.mark.parametrize(
    ("function", "sentinel", "field"),
    [
        ("nvmlDeviceGetMemoryInfo", SimpleNamespace(used=ULL), "memory_used_bytes"),
        ("nvmlDeviceGetPowerUsage", UINT, "power_w"),
        ("nvmlDeviceGetTotalEnergyConsumption", ULL, "energy_j"),
        ("nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=UINT, memory=41), "utilization_percent"),
        ("nvmlDeviceGetClockInfo", UINT, "sm_clock_hz"),
        ("nvmlDeviceGetCurrentClocksEventReasons", ULL, "throttle_reasons"),
    ],
)
def test_not_available_is_null_and_no_huge_number(function: str, sentinel: Any, field: str) -> None:
    read = values(FakeNvml(answers={function: sentinel}))
    assert read["gpu0", field] is None
    assert read["gpu0", "memory_busy_percent"] == 41


def test_a_true_zero_stays_zero() -> None:
    nvml = FakeNvml(answers={"nvmlDeviceGetPcieThroughput": 0, "nvmlDeviceGetCurrentClocksEventReasons": 0})
    read = values(nvml)
    assert read["gpu0", "pcie_sent_bytes_per_s"] == read["gpu0", "throttle_reasons"] == 0.0


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        ([os.getpid()], 0),
        ([os.getpid(), 1, 2], 2),
        ([os.getpid(), 1, 1], 1),
        ([700_001], 0),  # a container whose driver tells the host's numbers: that one is this process
        ([700_001, 700_002], 1),
        ([], None),  # this process computes there, so the list is hidden
    ],
)
def test_other_processes(pids: list[int], others: int | None) -> None:
    listed = [SimpleNamespace(pid=pid) for pid in pids]
    assert (
        values(FakeNvml(answers={"nvmlDeviceGetComputeRunningProcesses": listed}))["gpu0", "other_processes"] == others
    )


# --- which devices ----------------------------------------------------------------------------------------------------


def fake_cuda(monkeypatch: pytest.MonkeyPatch, uuids: list[str], reserved: list[int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda i: reserved[i])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i]))


def test_only_devices_in_use_are_read_under_cudas_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with CUDA_VISIBLE_DEVICES=1,0 (or the UUIDs in that order): CUDA's device 0 is NVML's second GPU."""
    fake_cuda(monkeypatch, [B, A], [0, 1 << 20])
    assert cuda_uuids() == {1: A}
    nvml = FakeNvml({(function, f"GPU-{B}"): "NVMLError_NotSupported" for function in ANSWERS})
    fake_cuda(monkeypatch, [B, A], [1, 1])
    read = values(nvml, uuids=cuda_uuids())
    assert read["gpu0", "power_w"] is None  # gpu0 is the GPU that refuses, B
    assert read["gpu1", "power_w"] == 312.5


def test_without_a_used_device_nothing_is_asked() -> None:
    nvml = FakeNvml()
    assert source_of(nvml, uuids={}).read() == []
    assert [name for name, *_ in nvml.calls] == ["nvmlInit"]


def test_a_device_that_nvml_does_not_know_is_left_out() -> None:
    assert {gpu for gpu, _ in values(FakeNvml(), uuids={0: MIG, 1: B})} == {"gpu1"}


def test_no_library_and_no_driver_give_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, [A], [1])
    for error in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
        monkeypatch.setitem(
            gpu_module.__dict__, "GpuSource", lambda *_, e=error: GpuSource(FakeNvml({"nvmlInit": e}), {})
        )
        assert gpu_source() is None


# --- MIG --------------------------------------------------------------------------------------------------------------

INSTANCES = {2: MIG, 5: "dddddddd-0000-0000-0000-000000000000"}
SECOND = INSTANCES[5]


@pytest.mark.parametrize(
    ("cuda_says", "visible", "instance"),
    [
        (MIG, None, MIG),  # CUDA gives the instance's UUID
        (A, None, MIG),  # CUDA gives the GPU's: it runs on the first instance
        (A, "0", MIG),
        (A, f"MIG-{SECOND}", SECOND),
        (A, f" MIG-{SECOND} ,MIG-{MIG}", SECOND),  # one instance at most is used
        (SECOND, f"MIG-{SECOND}", SECOND),
    ],
)
@pytest.mark.parametrize("gpm", [False, True])
def test_mig_asks_the_instance_that_cuda_runs_on(cuda_says: str, visible: str | None, instance: str, gpm: bool) -> None:
    nvml = FakeNvml(gpm=gpm, mig=INSTANCES)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    source = source_of(nvml, uuids={0: cuda_says}, environment=environment)
    nvml.calls.clear()
    read = {r.name: r.value for r in source.read()}
    assert read["memory_used_bytes"] == 7e9
    assert read["sm_clock_hz"] == 1980e6
    for name in ("utilization_percent", "memory_busy_percent", "power_w", "energy_j"):
        assert read[name] is None  # of the whole GPU, which others share
    asked = {call[0]: call[1] for call in nvml.calls}
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"):
        assert asked[function] == f"MIG-{instance}"
    shared = ("ClockInfo", "Temperature", "CurrentClocksEventReasons")
    assert {asked[f"nvmlDeviceGet{name}"] for name in shared} == {f"GPU-{A}"}
    if gpm:
        index = next(i for i, uuid in INSTANCES.items() if uuid == instance)
        assert [call[1:3] for call in nvml.calls if call[0] == "nvmlGpmMigSampleGet"] == [(f"GPU-{A}", 40 + index)]
    assert "nvmlGpmSampleGet" not in asked
    assert "nvmlDeviceGetPcieThroughput" not in asked


def test_mig_enabled_without_an_instance_has_no_device() -> None:
    nvml = FakeNvml(mig=INSTANCES)
    nvml.mig = {6: MIG}
    assert {gpu for gpu, _ in values(nvml, uuids={0: A})} == {"gpu0"}
    assert (
        values(FakeNvml({"nvmlDeviceGetMigDeviceHandleByIndex": "NVMLError_NotFound"}, mig=INSTANCES), uuids={0: A})
        == {}
    )


@pytest.mark.parametrize("error", REFUSALS)
def test_a_gpu_without_mig_is_read_as_a_whole(error: str) -> None:
    assert values(FakeNvml({"nvmlDeviceGetMigMode": error}))["gpu0", "power_w"] == 312.5


# --- GPM --------------------------------------------------------------------------------------------------------------


class Ticks:
    """A clock that shows what it is told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def gpm_of(nvml: FakeNvml) -> tuple[Gpm, Ticks]:
    (device,) = source_of(nvml, uuids={0: A})._devices.values()
    nvml.allocated.clear()
    ticks = Ticks()
    return Gpm(nvml, device, ticks), ticks


def test_gpm_pairs_each_sample_with_the_one_before() -> None:
    """The fake checks that the first sample of every question is older and the second the one just taken."""
    nvml = FakeNvml(gpm=True)
    gpm, ticks = gpm_of(nvml)
    assert gpm.read() == {}
    for _ in range(3):
        ticks.now_s += 0.11
        read = gpm.read()
        assert read["sm_active_percent"] == 71.5
        assert read["pcie_sent_bytes_per_s"] == 3 * 2**20
        assert read["tensor_active_percent"] is None  # this metric alone is not supported: no zero
        assert len(read) == len(METRICS)
    assert len(nvml.allocated) == 2
    gpm.close()
    assert nvml.allocated == []


def test_gpm_is_not_asked_sooner_than_its_counters_are_renewed() -> None:
    nvml = FakeNvml(gpm=True)
    gpm, ticks = gpm_of(nvml)
    seen = []
    for _ in range(20):  # 50 Hz
        ticks.now_s += 0.02
        seen.append(bool(gpm.read()))
    assert sum(seen) == nvml.sampled - 1 == 3


def test_a_nan_of_gpm_is_null() -> None:
    gpm, ticks = gpm_of(FakeNvml(gpm=True, answers={"gpm": {"NVML_GPM_METRIC_SM_UTIL": float("nan")}}))
    gpm.read()
    ticks.now_s = 1.0
    assert set(gpm.read().values()) == {None}


@pytest.mark.parametrize("function", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
@pytest.mark.parametrize("error", REFUSALS)
def test_gpm_that_fails_for_a_while_is_null_and_comes_back(function: str, error: str) -> None:
    nvml = FakeNvml(gpm=True)
    gpm, ticks = gpm_of(nvml)
    gpm.read()
    ticks.now_s, nvml.failures = 1.0, {function: error}
    assert set(gpm.read().values()) == {None}
    ticks.now_s, nvml.failures = 2.0, {}
    assert gpm.read()["sm_active_percent"] == 71.5


def test_with_gpm_the_slow_question_for_pcie_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(gpm=True)
    source = source_of(nvml)
    assert len(source.read()) == 20  # the first sample has none to be compared with
    for gpm in source._gpm.values():
        gpm._taken_s -= 1.0
    read = {(r.source, r.name): r.value for r in source.read()}
    assert read["gpu1", "pcie_sent_bytes_per_s"] == 3 * 2**20
    assert set(read) == {(gpu, name) for gpu in ("gpu0", "gpu1") for name in FIELDS}
    assert all(name != "nvmlDeviceGetPcieThroughput" for name, *_ in nvml.calls)
    source.close()
    assert nvml.open == 0
    assert nvml.allocated == []


@pytest.mark.parametrize("function", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc"])
def test_a_driver_without_gpm_leaves_the_rest(function: str) -> None:
    read = values(FakeNvml({function: "NVMLError_FunctionNotFound"}, gpm=True))
    assert read["gpu0", "sm_active_percent"] is None
    assert read["gpu0", "pcie_sent_bytes_per_s"] == 2.5e6
    assert read["gpu1", "power_w"] == 312.5
