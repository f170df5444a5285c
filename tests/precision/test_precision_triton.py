"""Runs triton_grouped_cases.py once in a process of its own (the interpreter must be chosen before Triton is imported),
compiles the kernels for GPUs that are not here, and asks which kernel a GPU would get."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import case_scripts
import pytest
import torch

from impls.precision.grouped_gemm import best_kernel, own_kernel, why_not
from impls.precision.int8 import Int8
from impls.precision.w4a8 import W4A8
from impls.precision.weight_only import Int3, Int4, Int8WeightOnly
from impls.seams import Arm, ModelShape

SCRIPT = Path(__file__).with_name("triton_grouped_cases.py")
CUDA = torch.device("cuda")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")


@pytest.mark.parametrize("name", case_scripts.case_names(SCRIPT))
def test_kernel(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "", outcomes[name]


@needs_triton
@pytest.mark.parametrize(
    ("capability", "x", "operand", "bits", "block_m", "split"),
    [(80, "bf16", "bf16", 4, 16, True), (90, "bf16", "bf16", 3, 64, False), (90, "i8", "int8", 4, 16, False)],
)
def test_kernels_compile_for_gpus_that_are_not_here(
    capability: int,
    x: str,
    operand: str,
    bits: int,
    block_m: int,
    split: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To machine code, products on tensor cores, within the shared memory of the smallest GPU of the architecture."""
    import triton
    from triton import language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from impls.precision.triton_kernels import CONFIGS, grouped_linear_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = grouped_linear_kernel.fn
    constants = {
        "BITS": bits, "ZERO_POINT": False, "SCALED": x == "i8", "BIAS": not split, "SPLIT": split, "BLOCK_M": block_m,
        "BLOCK_K": 64, "OPERAND": getattr(language, {"bf16": "bfloat16"}.get(operand, operand)),
    } | CONFIGS[0].kwargs  # fmt: skip
    types = {"x_ptr": f"*{x}", "x_scale_ptr": "*fp32", "words_ptr": "*i32", "scales_ptr": "*i32", "bias_ptr": "*bf16"}
    types["out_ptr"] = "*fp32" if split else "*bf16"
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    options = {"num_warps": CONFIGS[0].num_warps, "num_stages": CONFIGS[0].num_stages}
    built = triton.compile(
        ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32), options=options
    )
    assert len(built.asm["cubin"]) > 1000
    assert ("s32.s8" if x == "i8" else "bf16") in "".join(
        line for line in built.asm["ptx"].splitlines() if "mma" in line
    )
    assert built.metadata.shared <= 99 * 1024


def arm(device: str = "cuda", **precision: object) -> Arm:
    return Arm({"precision": precision}, ModelShape(256, 512, 1536, 2, 8, 4, 64, 128), 128, device, 1 << 20)


@pytest.fixture
def a_gpu_of(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def of(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return of


@needs_triton
def test_a_gpu_gets_the_triton_kernel_from_8_0_on(a_gpu_of) -> None:  # type: ignore[no-untyped-def]
    a_gpu_of(8, 0)
    for bits in (8, 4, 3, 2):
        assert best_kernel(CUDA, bits, False) == own_kernel(CUDA) == "triton_grouped"
    assert best_kernel(CUDA, 8, True) == "triton_grouped", "torch's own has a thread for each output on CUDA"
    assert Int4.validate(arm(group_size=64, kernel="torch_int4pack")) == []
    assert W4A8.validate(arm(group_size=64, kernel="triton_w4a8")) == []
    a_gpu_of(7, 5)
    assert best_kernel(CUDA, 4, False) == own_kernel(CUDA) == "dequantized"
    for kernel in ("triton_grouped", "torch_int4pack"):
        assert Int4.validate(arm(group_size=64, kernel=kernel)) == [
            f"kernel={kernel}: needs compute capability 8.0, whose tensor cores multiply BF16"
        ]
    assert "kernel=triton_w4a8: needs compute" in W4A8.validate(arm(group_size=64, kernel="triton_w4a8"))[0]


def test_without_triton_a_gpu_makes_the_weights_dense(a_gpu_of, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    a_gpu_of(9, 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert best_kernel(CUDA, 4, False) == "dequantized"
    assert "needs the package triton" in Int3.validate(arm(group_size=64, kernel="triton_grouped"))[0]


def test_validate_refuses_what_belongs_elsewhere() -> None:
    assert "not a kernel for device cpu" in Int4.validate(arm("cpu", group_size=64, kernel="triton_grouped"))[0]
    assert "not a kernel for device cpu" in W4A8.validate(arm("cpu", group_size=64, kernel="triton_w4a8"))[0]
    assert "not a kernel for device cuda" in Int8WeightOnly.validate(arm(kernel="torch_int8pack"))[0]
    assert "not for 4 bits with a scale for each row" in Int4.validate(arm("cpu", kernel="torch_int4pack"))[0]
    assert why_not("torch_int4pack", torch.device("cpu"), 4, True), "its groups are of 32, 64 or 128"
    assert Int8.validate(arm(kernel="cublas_int8")) == []
