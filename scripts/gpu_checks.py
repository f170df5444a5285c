"""The checks of gpu_check.sh that are no test and no study.

Each prints what it found and ends with an error where a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from harness.limits import head_parameters, linear_parameters
from harness.telemetry.gpu import gpu_source
from impls.models.source import open_model
from impls.models.synthetic import SyntheticWeights
from impls.precision.fp8 import Fp8, multiplies_fp8

ROOT = Path(__file__).parents[1]
ALWAYS = {"utilization_percent", "memory_used_bytes", "power_w", "energy_j", "sm_clock_hz", "temperature_c"}
ACTIVITY = {"sm_active_percent", "tensor_active_percent", "dram_active_percent"}  # of GPM, which Hopper brought


def machine(device: str, model: str, builds: int, seconds: float, scratch: Path) -> None:
    """What computes here, whether NVML answers, and how many of the model's layers ``builds`` builds of it may have
    within ``seconds``; the GPU's name and that number are left in ``scratch``."""
    print(sys.version, torch.__version__, torch.version.cuda)
    name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    (scratch / "gpu").write_text(name)
    num_layers = affordable_layers(device, model, builds, seconds)
    (scratch / "layers").write_text(str(num_layers))
    if device == "cuda":
        print(name, torch.cuda.get_device_capability(0))
        nvml_answers()


def affordable_layers(device: str, model: str, builds: int, seconds: float) -> int:
    """All, or half as often as it takes. Random weights come from the host's cores, the same on every device, and are
    copied: what a layer takes is measured."""
    shape = open_model(yaml.safe_load((ROOT / "conf" / "model" / f"{model}.yaml").read_text())).shape
    weights = SyntheticWeights(shape, 0)
    torch.zeros(1, device=device)  # the context is no part of a layer
    begun, made = time.perf_counter(), 0
    for name in weights:
        if ".layers.0." in name:
            tensor = weights[name].to(device, torch.bfloat16)
            made += tensor.numel()
    if device == "cuda":
        torch.cuda.synchronize()
    s_per_parameter = (time.perf_counter() - begun) / made

    def build_s(layers: int) -> float:
        parameters = linear_parameters(shape) * layers // shape.num_layers + 2 * head_parameters(shape)
        return parameters * s_per_parameter

    layers = shape.num_layers
    while layers > 1 and builds * build_s(layers) > seconds:
        layers //= 2
    whole = shape.num_layers
    print(f"{layers} of {whole} layers: a build takes {build_s(layers):.1f} s, {builds} may take {seconds:g} s")
    return layers


def nvml_answers() -> None:
    """NVML knows what every GPU has; from compute capability 9.0 on, how busy its SMs, tensor cores and DRAM are."""
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = gpu_source()  # of the GPUs that hold something of ours
    assert source is not None, "NVML does not answer"
    for _ in range(2):  # a rate needs two readings, and something to see between them
        for _ in range(50):
            square @ square
        torch.cuda.synchronize()
        time.sleep(0.2)  # GPM gives no figure for less than 0.1 s; what lies behind us counts
        readings = source.read()
    source.close()
    for reading in readings:
        print(*reading)
    known = {reading.name for reading in readings if reading.value is not None}
    missing = sorted(ALWAYS - known)
    assert not missing, f"NVML gives no {', '.join(missing)}"
    silent, (major, minor) = sorted(ACTIVITY - known), torch.cuda.get_device_capability(0)
    print(f"GPM gives no {', '.join(silent)}" if silent else "GPM answers")
    assert not silent or major < 9, (
        f"GPM gives no {', '.join(silent)}, which a GPU of compute capability {major}.{minor} has: an old "
        "driver, a slice of a GPU (MIG), or no right to its counters?"
    )


def fp8(device_name: str) -> None:
    """FP8 is multiplied as FP8, not emulated, for every number of rows that a step may have, in both granularities."""
    device = torch.device(device_name)
    granularities = ["tensor"]
    if device.type == "cuda":
        assert multiplies_fp8(device), "this GPU has no FP8 product (compute capability 8.9 on)"
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0):
        granularities.append("row")
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(1024, 512, generator=draw) / 512**0.5
    for granularity in granularities:
        method = Fp8(device, granularity=granularity)
        packed = method.pack(weight)
        for rows in (1, 2, 5, 16, 33, 256):
            x = torch.randn(rows, 512, generator=draw).to(device, method.activation_dtype)
            values, scale = method.quantize_activations(x)
            exact = (values.double() * scale.double()) @ method.dequantize(packed).to(device).double().T
            torch.testing.assert_close(method.apply(x, packed).double(), exact, rtol=2e-2, atol=2e-2)
        print(granularity, method.kernel, method.emulated)
        assert method.kernel.startswith("scaled_mm") == (device.type == "cuda")


def run(run_dir: Path, device: str) -> None:
    """Every arm ran (a CPU may have reasons not to), its tokens are those of its reference, its energy is known."""
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    bad = []
    for name, arm in summary["arms"].items():
        metrics = arm["metrics"]
        figures = [metrics.get(key) for key in ("output_tokens_per_s", "equivalence", "energy_j_per_output_token")]
        print(name, arm["status"], *arm["reasons"], *figures)
        if device == "cuda" and (arm["status"] != "ok" or figures[2] is None):
            bad.append(f"{name}: {arm['status']}, energy {figures[2]}")
    for path in sorted(run_dir.glob("*/*/run.json")):
        warnings = json.loads(path.read_text())["validity"]
        print(path.relative_to(run_dir).parent, *warnings, sep="\n  ")
        bad += [f"{path.parent}: {warning}" for warning in warnings if warning.startswith("token mismatch")]
    assert not bad, bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    checks = parser.add_subparsers(required=True, metavar="check")
    for check, arguments in (
        (machine, {"device": str, "model": str, "builds": int, "seconds": float, "scratch": Path}),
        (fp8, {"device_name": str}),
        (run, {"run_dir": Path, "device": str}),
    ):
        added = checks.add_parser(check.__name__, help=check.__doc__, description=check.__doc__)
        for name, kind in arguments.items():
            added.add_argument(name, type=kind)
        added.set_defaults(check=check)
    given = vars(parser.parse_args())
    given.pop("check")(**given)


if __name__ == "__main__":
    main()
