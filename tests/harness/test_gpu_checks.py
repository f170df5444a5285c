"""scripts/gpu_checks.py, whose one chance on a GPU comes late: what passes there, and what must not."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_nvml import A, FakeNvml, source_of
from golden import contiguous_burst, play

from harness.equivalence import Divergence, mismatches
from harness.metrics import compute_metrics
from harness.records import TELEMETRY_SCHEMA, frame, write_json, write_trial
from harness.summary import summarize
from impls.models.synthetic import SyntheticWeights
from scripts import gpu_checks

MISMATCH = mismatches([Divergence("r3", 5, 1, 2, gap=0.7)], 0.5)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """As the shell calls it: `python -m scripts.gpu_checks ...`."""
    monkeypatch.setattr("sys.argv", ["gpu_checks.py", *arguments])
    runpy.run_path(gpu_checks.__file__, run_name="__main__")


# --- run: the records of a study --------------------------------------------------------------------------------------


def write_run(run_dir: Path, second: Mapping[str, Any], joules: float | None = 600.0) -> Path:
    """Two arms, measured by hand. ``second``: fields of the second one's run.json; ``joules``: of its energy."""
    recorder = play(*contiguous_burst())
    for arm, fields, energy in (("static", {}, 1000.0), ("paged", second, joules)):
        telemetry = frame(
            {
                **{"t_s": [-1.0, 4.0], "source": ["gpu0"] * 2, "name": ["energy_j"] * 2, "unit": ["J"] * 2},
                "value": [0.0, energy],
            },
            TELEMETRY_SCHEMA,
        )
        requests, steps = recorder.requests(), recorder.steps()
        window, metrics, _ = compute_metrics(requests, steps, telemetry, window_rule="burst", max_num_seqs=2)
        run = {
            **{"study": "ladder", "arm": arm, "trial": 0, "status": "ok", "reasons": [], "axes": {}, "seed": 0},
            **{"config": {}, "provenance": {}, "limits": {}, "clock": "real", "emulated": []},
            **{"window": window, "metrics": metrics, "validity": ["GPU clock throttling: gpu0 in 50 % of 4 samples"]},
            **fields,
        }
        write_trial(run_dir / arm / "0", run, requests, steps, telemetry)
    write_json(run_dir / "study.json", {"baseline": "static", "arms": {"static": {}, "paged": {"versus": "static"}}})
    summarize(run_dir)
    return run_dir


def test_a_run_whose_arms_all_ran_passes_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, "run", str(write_run(tmp_path, {})), "cuda")
    shown = capsys.readouterr().out
    assert "static ok 2.0 None 100.0\n" in shown  # 200 W for the 3 s of 6 tokens
    assert "paged/0\n  GPU clock throttling" in shown


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_token_mismatch_fails_a_run(tmp_path: Path, device: str) -> None:
    assert MISMATCH
    with pytest.raises(AssertionError, match=r"paged.*token mismatch: request r3"):
        gpu_checks.run(write_run(tmp_path, {"validity": MISMATCH}), device)


def test_a_missing_energy_fails_a_run_on_a_gpu(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, {}, joules=None)
    with pytest.raises(AssertionError, match="paged: ok, energy None") as failed:
        gpu_checks.run(run_dir, "cuda")
    assert "static" not in str(failed.value)
    gpu_checks.run(run_dir, "cpu")


@pytest.mark.parametrize("status", ["failed", "not_run"])
def test_an_arm_that_did_not_run_fails_a_run_on_a_gpu(tmp_path: Path, status: str) -> None:
    run_dir = write_run(tmp_path, {"status": status, "reasons": ["no FP8"], "metrics": {}})
    with pytest.raises(AssertionError, match=f"paged: {status}, energy None"):
        gpu_checks.run(run_dir, "cuda")
    gpu_checks.run(run_dir, "cpu")  # which may have its reasons


# --- machine: how many layers there is time for, and whether NVML answers ---------------------------------------------


@pytest.mark.parametrize(
    ("builds", "seconds", "layers"),
    # At 1 us a parameter: 36864 a layer and 65536 in the two tables are 1.245, 0.655, 0.360, ... s.
    [(1, 1.25, 32), (1, 1.24, 16), (10, 6.6, 16), (10, 6.5, 8), (13, 0.0, 1)],
)
def test_layers_are_halved_until_all_builds_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: int, seconds: float, layers: int
) -> None:
    tiny = (gpu_checks.ROOT / "conf" / "model" / "tiny.yaml").read_text()
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "deep.yaml").write_text(tiny.replace("num_layers: 2", "num_layers: 32"))
    drawn: list[int] = []

    class Timed(SyntheticWeights):
        def __getitem__(self, name: str) -> torch.Tensor:
            tensor = super().__getitem__(name)
            drawn.append(tensor.numel())
            return tensor

    monkeypatch.setattr(gpu_checks, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_checks, "SyntheticWeights", Timed)
    monkeypatch.setattr(gpu_checks, "time", SimpleNamespace(perf_counter=lambda: 1e-6 * sum(drawn)))
    assert gpu_checks.affordable_layers("cpu", "deep", builds, seconds) == layers
    assert sum(drawn) == 36864 + 2 * 64  # one layer with its norms


def test_what_the_shell_reads_is_left_where_it_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, "machine", "cpu", "tiny", "13", "90", str(tmp_path))
    assert (tmp_path / "gpu").read_text() == "cpu" and (tmp_path / "layers").read_text() == "2"
    assert "2 of 2 layers: a build takes" in capsys.readouterr().out


def with_gpu(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, capability: tuple[int, int] = (8, 0)) -> list[str]:
    """Of a GPU that has ``nvml``: what is asked of CUDA, in order, and of NVML."""
    asked: list[str] = []

    def randn(*size: int, device: str, dtype: torch.dtype) -> torch.Tensor:
        asked.append(f"memory on {device}")
        return torch.zeros(1, 1, dtype=dtype)

    def source() -> Any:
        asked.append("source")
        return source_of(nvml, uuids={0: A})

    cuda = SimpleNamespace(
        synchronize=lambda: asked.append("synchronize"), get_device_capability=lambda device: capability
    )
    monkeypatch.setattr(gpu_checks, "torch", SimpleNamespace(randn=randn, bfloat16=torch.bfloat16, cuda=cuda))
    monkeypatch.setattr(gpu_checks, "gpu_source", source)
    return asked


BUSY = {"NVML_GPM_METRIC_SM_UTIL": 71.5, "NVML_GPM_METRIC_ANY_TENSOR_UTIL": 40.0, "NVML_GPM_METRIC_DRAM_BW_UTIL": 0.0}
SILENT = "GPM gives no dram_active_percent, sm_active_percent, tensor_active_percent"


@pytest.mark.parametrize(("gpm", "said"), [(True, "GPM answers\n"), (False, f"{SILENT}\n")])
def test_an_answering_nvml_passes_with_gpm_and_before_hopper_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpm: bool, said: str
) -> None:
    nvml = FakeNvml(gpm=gpm, answers={"gpm": BUSY})
    asked = with_gpu(monkeypatch, nvml, capability=(9, 0) if gpm else (8, 9))
    gpu_checks.nvml_answers()
    shown = capsys.readouterr().out
    assert said in shown and "gpu0 energy_j 5000.0 J" in shown
    assert asked[:2] == ["memory on cuda", "source"]  # only a GPU that holds memory of ours is read
    assert asked.count("synchronize") == 2 and nvml.open == 0


@pytest.mark.parametrize("capability", [(9, 0), (10, 3), (12, 0)])
def test_from_hopper_on_a_gpu_whose_gpm_is_silent_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    told = f"which a GPU of compute capability {capability[0]}.{capability[1]} has"
    with_gpu(monkeypatch, FakeNvml(gpm=False), capability)
    with pytest.raises(AssertionError, match=f"{SILENT}, {told}"):
        gpu_checks.nvml_answers()
    no_tensor = {name: value for name, value in BUSY.items() if "TENSOR" not in name}
    with_gpu(monkeypatch, FakeNvml(gpm=True, answers={"gpm": no_tensor}), capability)
    with pytest.raises(AssertionError, match=f"GPM gives no tensor_active_percent, {told}"):
        gpu_checks.nvml_answers()


@pytest.mark.parametrize(
    ("refused", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization_percent"),
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes"),
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_j"),
        ("nvmlDeviceGetClockInfo", "sm_clock_hz"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
    ],
)
def test_an_nvml_that_refuses_what_every_gpu_has_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, refused: str, field: str
) -> None:
    with_gpu(monkeypatch, FakeNvml({refused: "NVMLError_NotSupported"}))
    monkeypatch.setattr(gpu_checks, "time", SimpleNamespace(sleep=lambda seconds: None))
    with pytest.raises(AssertionError, match=f"NVML gives no {field}$"):
        gpu_checks.nvml_answers()


def test_no_nvml_and_an_nvml_that_knows_no_such_gpu_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, FakeNvml({"nvmlDeviceGetHandleByUUID": "NVMLError_NotFound"}))
    monkeypatch.setattr(gpu_checks, "time", SimpleNamespace(sleep=lambda seconds: None))
    with pytest.raises(AssertionError, match="NVML gives no"):
        gpu_checks.nvml_answers()
    monkeypatch.setattr(gpu_checks, "gpu_source", lambda: None)
    with pytest.raises(AssertionError, match="NVML does not answer"):
        gpu_checks.nvml_answers()


# --- fp8 --------------------------------------------------------------------------------------------------------------


def test_fp8_is_held_against_an_exact_product(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, "fp8", "cpu")
    apply = gpu_checks.Fp8.apply
    monkeypatch.setattr(gpu_checks.Fp8, "apply", lambda self, x, packed: 1.1 * apply(self, x, packed))
    with pytest.raises(AssertionError, match="not close"):
        gpu_checks.fp8("cpu")
