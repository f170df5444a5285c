"""On a MIG instance: whose readings are the instance's, whose the GPU's, and which instance it is."""

from __future__ import annotations

import pytest
from fake_nvml import MIG, REFUSALS, A, FakeNvml, source_of, values

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
