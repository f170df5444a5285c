"""What an option says that its weights will take, before anything is built, is what they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.arm import option, weight_bits
from impls.build import construct
from impls.precision.grouped import round_to_nearest

CPU = torch.device("cpu")
OPTIONS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf/precision").glob("*.yaml"))


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_a_weight_are_those_of_a_packed_layer(name: str) -> None:
    chosen = option("precision", name)
    method = construct(chosen, device=CPU)
    if method.emulated:
        pytest.skip(f"held in other numbers here: {method.emulated}")
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    packed = method.pack(round_to_nearest(weight, 4, 32).dequantize())  # which gguf takes too
    assert weight_bits(chosen) == pytest.approx(8 * packed.num_bytes() / weight.numel(), rel=0.01)
    assert method.arithmetic in ("fp32", "bf16", "fp8", "int8")


@pytest.mark.parametrize(("name", "kernel"), [("int4", "torch_int4pack"), ("int8_weight_only", "torch_int8pack")])
def test_a_kernel_of_torch_s_takes_no_more(name: str, kernel: str) -> None:
    """On any CPU it gets BF16 activations and 16-bit scales: given FP32 it would be a scalar loop."""
    chosen = option("precision", name) | {"kernel": kernel}
    method = construct(chosen, device=CPU)
    packed = method.pack(torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)))
    assert weight_bits(chosen) == pytest.approx(8 * packed.num_bytes() / (512 * 1024), rel=0.01)
    assert method.activation_dtype == packed.tensors["scale"].dtype == torch.bfloat16


def test_bits_follow_the_options() -> None:
    gptq = option("precision", "gptq")
    assert weight_bits(gptq) == 4.5 and weight_bits(gptq | {"bits": 2, "group_size": 32}) == 3.0
    assert weight_bits(gptq | {"group_size": None}) == 4.0
