"""GPM: activity from pairs of samples, no sooner than its counters are renewed."""

from __future__ import annotations

import pytest
from fake_nvml import FIELDS, REFUSALS, A, FakeNvml, source_of, values

from harness.telemetry.gpm import METRICS, Gpm


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
