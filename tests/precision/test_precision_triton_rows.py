"""Runs triton_rows_cases.py once in a process of its own: the interpreter must be chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import case_scripts
import pytest
import torch

from impls.precision.fp8 import Fp8
from impls.precision.int8 import Int8
from impls.precision.w8a8 import row_kernels

SCRIPT = Path(__file__).with_name("triton_rows_cases.py")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", case_scripts.case_names(SCRIPT))
def test_kernels(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "", outcomes[name]


@needs_triton
@pytest.mark.parametrize(("capability", "values"), [(80, "i8"), (89, "fp8e4nv"), (90, "fp8e4nv")])
def test_they_compile_for_gpus_that_are_not_here(
    capability: int, values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from impls.precision.triton_rows import quantize_rows_kernel, rescale_rows_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    integers = values == "i8"
    kernels = (
        (
            quantize_rows_kernel,
            {"x_ptr": "*bf16", "values_ptr": f"*{values}", "scale_ptr": "*fp32"},
            {"LARGEST": 127.0 if integers else 448.0, "SMALLEST": 1e-12, "INTEGERS": integers, "BLOCK": 1024},
        ),
        (
            rescale_rows_kernel,
            {"products_ptr": "*i32", "out_ptr": "*bf16"}
            | dict.fromkeys(("scale_ptr", "weight_scale_ptr", "bias_ptr"), "*fp32"),
            {"BIAS": True, "BLOCK": 1024},
        ),
    )
    for kernel, pointers, constants in kernels:
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
        built = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
        assert len(built.asm["cubin"]) > 1000
        if kernel is quantize_rows_kernel:
            assert "div.rn.f32" in built.asm["ptx"]
            assert integers or "e4m3x2" in built.asm["ptx"]


@pytest.mark.parametrize(
    ("capability", "method", "kernel"),
    [
        ((9, 0), lambda: Int8(CUDA), "cublas_int8"),
        ((7, 5), lambda: Int8(CUDA), "cublas_int8_unfused"),
        ((9, 0), lambda: Fp8(CUDA), "scaled_mm"),
        ((9, 0), lambda: Fp8(CUDA, granularity="tensor"), "scaled_mm_unfused"),
    ],
)
@needs_triton
def test_a_record_says_where_operators_surround_the_product(capability, method, kernel, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert method().kernel == kernel


def test_on_a_cpu_there_are_none() -> None:
    assert row_kernels(torch.device("cpu")) is None
