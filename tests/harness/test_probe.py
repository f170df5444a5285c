"""Measured peaks: the arithmetic with a fake timer, what is kept of them, and for how long."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import contiguous_burst, play

import harness.probe as probe
import harness.probe_sizes as probe_sizes
from harness.limits import Peaks, StepCost
from harness.metrics import compute_metrics
from harness.records import TELEMETRY_SCHEMA, empty_frame
from harness.validity import peak_warnings
from impls.precision.bf16 import Bf16
from impls.precision.fp32 import Fp32
from impls.precision.int8 import Int8
from impls.seams import LinearMethod

CPU = torch.device("cpu")
UNDISTURBED = probe.undisturbed


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MOST_COPY_BYTES": 2**12, "GEMM_ROWS": 3, "GEMM_SIZE": 64}.items():
        monkeypatch.setattr(probe_sizes, name, value)
    monkeypatch.setattr(probe, "PROBE_S", 0.001)
    monkeypatch.setattr(probe, "undisturbed", lambda cpu_s, wall_s, threads: True)


def takes(seconds: float, done: list[object]) -> Callable[[Callable[[], object], str], float]:
    def timed(work: Callable[[], object], device: str) -> float:
        done.append(work())
        return seconds

    return timed


def test_a_copy_counts_what_is_read_and_what_is_written() -> None:
    done: list[Any] = []
    assert probe.copy_bytes_per_s("cpu", takes(0.5, done)) == 2 * 2**12 / 0.5
    assert done[0].numel() * 4 == 2**12 and (done[0] == 1).all()  # it was copied


@pytest.mark.parametrize("method", [Fp32, Bf16, Int8])
def test_the_gemm_is_the_methods_own_and_a_multiply_add_is_two(method: type[Any]) -> None:
    done: list[Any] = []
    own: LinearMethod = method(CPU)
    assert probe.gemm_flops_per_s("cpu", own, takes(0.25, done)) == 2 * 3 * 64 * 64 / 0.25
    assert done[0].shape == (3, 64) and done[0].dtype == own.activation_dtype


def test_the_best_of_the_runs_counts_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_S", 10.0)
    now, lengths = [100.0], iter([0.1, 4.0, 1.5, 3.0, 2.0, 9.0])  # the first may build what it runs

    def work() -> None:
        now[0] += next(lengths)

    assert probe.best_seconds(work, "cpu", lambda: now[0]) == 1.5
    assert next(lengths) == 9.0  # four runs: over after 10.5 s


def test_a_gpu_is_waited_for_once_for_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes 1 s, a call 1 s, a wait 5 s: one for each call would be taken for its work."""
    monkeypatch.setattr(probe, "PROBE_S", 1.0)
    now, queued = [0.0], [0]

    def work() -> None:
        now[0] += 1.0
        queued[0] += 1

    def wait() -> None:
        now[0] += queued[0] * 1.0 + 5.0
        queued[0] = 0

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    assert probe.best_seconds(work, "cuda", lambda: now[0]) == 2.0 + 5.0 / probe.GPU_CALLS


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was measured, in order; the n-th measurement finds n a second."""
    seen: list[str] = []

    def gemm(device: str, method: LinearMethod) -> float:
        seen.append(type(method).__name__)
        return float(len(seen))

    def copy(device: str) -> float:
        seen.append("copy")
        return float(len(seen))

    monkeypatch.setattr(probe, "gemm_flops_per_s", gemm)
    monkeypatch.setattr(probe, "copy_bytes_per_s", copy)
    yield seen


def test_a_gemm_is_measured_once_for_each_method_and_the_bandwidth_once(probed: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        assert probe.peaks("cpu", Fp32(CPU), tmp_path) == Peaks(1.0, 2.0, "measured")
        assert probe.peaks("cpu", Bf16(CPU), tmp_path) == Peaks(3.0, 2.0, "measured")
    assert probed == ["Fp32", "copy", "Bf16"]
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".json"]


@pytest.mark.parametrize(
    ("owner", "name", "value", "again"),
    [
        (torch, "__version__", "9.9", ["Fp32", "copy"]),
        (torch, "get_num_threads", lambda: 77, ["Fp32", "copy"]),
        (probe, "device_name", lambda device: "another processor", ["Fp32", "copy"]),
        (probe, "VERSION", probe.VERSION + 1, ["Fp32", "copy"]),
        (probe.platform, "node", lambda: "another host", ["Fp32", "copy"]),
        (probe.os, "cpu_count", lambda: 999, ["Fp32", "copy"]),
        (probe, "memory_total_bytes", lambda device: 2**50, ["Fp32", "copy"]),
        (probe, "code_version", lambda: "other kernels", ["Fp32"]),
        (Fp32, "kernel", "another kernel", ["Fp32"]),
    ],
)
def test_a_peak_is_of_one_machine_and_one_kernel(
    probed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    value: Any,
    again: list[str],
) -> None:
    first = probe.peaks("cpu", Fp32(CPU), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value, raising=False)
        own = Fp32(CPU)
        if owner is Fp32:
            own.kernel = value
        for _ in range(2):
            probe.peaks("cpu", own, tmp_path)
    assert probed == ["Fp32", "copy", *again]
    assert probe.peaks("cpu", Fp32(CPU), tmp_path) == first and len(probed) == 2 + len(again)


def test_a_peak_of_a_busy_machine_is_the_best_of_three_and_is_not_kept(
    probed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(probe, "undisturbed", lambda cpu_s, wall_s, threads: False)
    assert probe.peaks("cpu", Fp32(CPU), tmp_path) == Peaks(3.0, 6.0, "measured, on a busy host")
    monkeypatch.setattr(probe, "undisturbed", lambda cpu_s, wall_s, threads: threads == 1)  # the copy alone suffers
    assert probe.peaks("cpu", Fp32(CPU), tmp_path) == Peaks(7.0, 10.0, "measured, on a busy host")
    monkeypatch.setattr(probe, "undisturbed", lambda cpu_s, wall_s, threads: True)
    assert probe.peaks("cpu", Fp32(CPU), tmp_path) == Peaks(7.0, 11.0, "measured")
    assert probe.peaks("cpu", Fp32(CPU), tmp_path) == Peaks(7.0, 11.0, "measured") and len(probed) == 11


def test_who_gets_less_than_three_quarters_of_the_processors_is_disturbed() -> None:
    assert not UNDISTURBED(1.4, 1.0, 2) and UNDISTURBED(1.6, 1.0, 2)
    assert not UNDISTURBED(0.7, 1.0, 1) and UNDISTURBED(0.8, 1.0, 1)
    assert UNDISTURBED(0.0, 1.0, 0)  # a GPU's figure


def test_a_peak_is_measured_again_after_a_month_or_if_it_is_from_the_future(
    probed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = time.time()
    for at, measured in ((0, 2), (29 * 86400, 2), (31 * 86400, 4), (40 * 86400, 4), (20 * 86400, 6)):
        monkeypatch.setattr(probe.time, "time", lambda at=at: begun + at)
        assert probe.peaks("cpu", Fp32(CPU), tmp_path).bytes_per_s == measured, at


DAMAGE: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "empty": lambda kept: b"",
    "cut": lambda kept: json.dumps(kept).encode()[:40],
    "no object": lambda kept: b"[1, 2]",
    "no text": lambda kept: b"\xff\xfe\x00",
    "deep": lambda kept: b"[" * 100_000,
    "null": lambda kept: json.dumps({**kept, "per_s": None}).encode(),
    "zero": lambda kept: json.dumps({**kept, "per_s": 0}).encode(),
    "infinite": lambda kept: json.dumps({**kept, "per_s": float("inf")}).encode(),
    "not a number": lambda kept: json.dumps({**kept, "per_s": float("nan")}).encode(),
    "without its key": lambda kept: json.dumps({k: v for k, v in kept.items() if k != "key"}).encode(),
    "of another key": lambda kept: json.dumps({**kept, "key": {**kept["key"], "threads": 99}}).encode(),
    "without its date": lambda kept: json.dumps({k: v for k, v in kept.items() if k != "measured_at"}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_says_nothing_reliable_is_measured_anew(probed: list[str], tmp_path: Path, damage: str) -> None:
    probe.peaks("cpu", Fp32(CPU), tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(DAMAGE[damage](json.loads(path.read_text())))
    assert [probe.peaks("cpu", Fp32(CPU), tmp_path) for _ in range(2)] == [Peaks(3.0, 4.0, "measured")] * 2


def test_without_a_place_to_keep_it_a_peak_is_measured_each_time(probed: list[str], tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert [probe.peaks("cpu", Fp32(CPU), blocked / "cache").flops_per_s for _ in range(2)] == [1.0, 3.0]


def test_a_real_probe_finds_rates_above_zero(tmp_path: Path) -> None:
    found = probe.peaks("cpu", Fp32(CPU), tmp_path)
    assert found.source == "measured"
    assert found.flops_per_s is not None and found.bytes_per_s is not None
    assert 1e5 < found.flops_per_s < 1e15 and 1e5 < found.bytes_per_s < 1e14


def test_more_than_the_peak_is_a_warning_that_names_it() -> None:
    peaks = Peaks(45.6e9, 20e9, "measured")
    assert peak_warnings({"mfu": 1.0, "mbu": 0.4}, peaks) == []
    assert peak_warnings({"mfu": None, "mbu": None}, Peaks(None, None, "unknown")) == []
    assert peak_warnings({"mfu": 1.5, "mbu": 1.25}, peaks) == [
        "MFU above 1: 1.50 of the measured peak of 45.6 GFLOP/s, which is lower than what this arm reached",
        "MBU above 1: 1.25 of the measured peak of 20 GB/s, which is lower than what this arm reached",
    ]


def test_a_trial_beyond_its_peak_says_so_in_its_record() -> None:
    recorder = play(*contiguous_burst())
    steps = recorder.steps(lambda stats: StepCost(100, 100))  # 400 of each in 3 s
    telemetry = empty_frame(TELEMETRY_SCHEMA)
    for flops_per_s, warned in ((100.0, True), (200.0, False)):
        extras = {"peaks": Peaks(flops_per_s, 1e3, "datasheet")}
        _, metrics, warnings = compute_metrics(
            recorder.requests(), steps, telemetry, window_rule="burst", extras=extras
        )
        assert metrics["mfu"] == pytest.approx(400 / (3 * flops_per_s))
        above = [w for w in warnings if "above 1" in w]
        assert len(above) == warned and all(w.startswith("MFU above 1: 1.33 of the datasheet peak") for w in above)
