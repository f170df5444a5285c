"""Attention kernels and linear methods at the shapes of SmolLM2-135M, each checked against its reference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
from attention_steps import Step, model_shape, tolerance
from conftest import best_seconds

from impls.build import locate
from impls.models.llama import LlamaModel
from impls.models.source import open_model
from impls.models.synthetic import SyntheticWeights
from impls.precision import gemm, grouped_gemm, int8, w4a8
from impls.precision.fp32 import Fp32
from impls.seams import Arm, LinearMethod

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, INTERMEDIATE = 576, 1536
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5, "w4a8": 0.5}  # without scales
STEPS = {"decode": [(1, 256 + i) for i in range(16)], "prefill": [(128, 128), (128, 256)]}


def synchronised(work: Any) -> Any:
    def run(*arguments: Any) -> Any:
        result = work(*arguments)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return result

    return run


@pytest.mark.parametrize("kind", sorted(STEPS))
@pytest.mark.parametrize("name", ["reference", "sdpa", "native", "triton"])
def test_attention(benchmark: Any, project_conf: Any, name: str, kind: str) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    step = Step(STEPS[kind], block_size=16, shape=model_shape(9, 3, 64), dtype=dtype, device=DEVICE)
    option = project_conf("attention", name)
    reasons = locate(option).validate(Arm({"attention": option}, step.shape, 2048, DEVICE, 1))
    if reasons:
        pytest.skip("; ".join(reasons))
    backend = step.backend(locate(option))
    backend.prepare(step.batch)
    out = benchmark.pedantic(
        synchronised(backend.forward), (step.q, step.k, step.v, 0), rounds=12, iterations=2, warmup_rounds=2
    )
    torch.testing.assert_close(out, step.reference(), **tolerance(dtype))
    benchmark.extra_info.update(
        rows=step.batch.num_rows, kv_tokens=sum(step.batch.kv_lens), gathered_bytes=backend.gathered_bytes(step.batch)
    )


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("name", WEIGHT_BYTES)
def test_linear(benchmark: Any, project_conf: Any, name: str, rows: int) -> None:
    option = project_conf("precision", name)
    method: LinearMethod = locate(option)(
        device=torch.device(DEVICE), **{key: value for key, value in option.items() if key not in ("name", "_target_")}
    )
    draw = torch.Generator().manual_seed(0)
    packed = method.pack(torch.randn(INTERMEDIATE, HIDDEN, generator=draw) / HIDDEN**0.5)
    x = torch.randn(rows, HIDDEN, generator=draw).to(DEVICE, method.activation_dtype)
    out = benchmark.pedantic(synchronised(method.apply), (x, packed), rounds=20, iterations=2, warmup_rounds=2)
    exact = x.double() @ method.dequantize(packed).to(DEVICE).double().T
    assert out.shape == exact.shape
    assert float((out.double() - exact).norm() / exact.norm()) < 0.05  # activations are rounded too
    least = HIDDEN * INTERMEDIATE * (2 if name == "fp8" and method.emulated else WEIGHT_BYTES[name])
    resident = packed.num_bytes()
    assert least <= resident <= 2.1 * least
    benchmark.extra_info.update(kernel=method.kernel, resident_bytes=resident)


KERNELS: dict[str, Collection[str]] = {
    **{"bf16": gemm.BF16_KERNELS, "int8": int8.KERNELS, "w4a8": w4a8.KERNELS},
    **dict.fromkeys(("int8_weight_only", "int4"), grouped_gemm.KERNELS),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="which kernel is fastest on a GPU has not been measured yet")
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("name", KERNELS)
def test_auto_takes_no_slow_kernel(benchmark: Any, project_conf: Any, name: str, rows: int) -> None:
    """A processor nobody has seen may lack what a kernel was chosen for: torch's 4 bits once took 200 times as long."""
    option = project_conf("precision", name)
    options = {key: value for key, value in option.items() if key not in ("name", "_target_", "kernel")}
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(INTERMEDIATE, HIDDEN, generator=draw), torch.randn(rows, HIDDEN, generator=draw)
    products: dict[str, Callable[[], object]] = {}
    for kernel in ("auto", *KERNELS[name]):
        try:
            method: LinearMethod = locate(option)(device=torch.device(DEVICE), **options, kernel=kernel)
        except ValueError:  # not a kernel for this machine, or these bits
            continue
        products[kernel] = partial(method.apply, x.to(method.activation_dtype), method.pack(weight))
    best = dict.fromkeys(products, math.inf)

    def in_turns() -> None:
        for kernel, product in products.items():
            start = time.perf_counter()
            product()
            best[kernel] = min(best[kernel], time.perf_counter() - start)

    benchmark.pedantic(in_turns, rounds=10, warmup_rounds=1)
    benchmark.extra_info.update({f"us {kernel}": round(seconds * 1e6, 1) for kernel, seconds in best.items()})
    slow = best["auto"] > 5 * min(best.values())  # wide: a kernel may be the better one on other processors
    assert best_seconds(benchmark) is None or not slow, best


class CountOperators(torch.utils._python_dispatch.TorchDispatchMode):
    """How many operators a forward dispatches: on a GPU, its kernel launches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_model_forward_dispatches_as_often_for_many_rows_as_for_one(benchmark: Any, project_conf: Any) -> None:
    shape = open_model(project_conf("model", "tiny")).shape
    model = LlamaModel(shape, SyntheticWeights(shape, 0), Fp32(torch.device(DEVICE)), torch.device(DEVICE))

    def forward(rows: int) -> int:
        ids = torch.arange(rows, device=DEVICE)
        with torch.inference_mode(), CountOperators() as counter:
            model.logits(model.forward(ids, ids, lambda layer, q, k, v: q))
        return counter.count

    many = benchmark.pedantic(forward, (64,), rounds=5, warmup_rounds=1)
    assert many == forward(1) > 0
    benchmark.extra_info.update(operators=many)
