"""NVML at the binding's edge, field by field, and which devices are read."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_nvml import ANSWERS, FIELDS, MIG, REFUSALS, UINT, ULL, A, B, FakeNvml, source_of, values

from harness.telemetry import gpu as gpu_module
from harness.telemetry.devices import cuda_uuids
from harness.telemetry.gpu import GpuSource, gpu_source


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
            gpu_module.__dict__, "GpuSource", lambda *_, e=error, **__: GpuSource(FakeNvml({"nvmlInit": e}), {})
        )
        assert gpu_source() is None
