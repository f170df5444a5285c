"""The operators between the matrix products: when they are C, when torch, and that a tied table is resident once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from model_testing import relative_error, stepwise_logits

from impls import native
from impls.models import ops
from impls.models.llama import LlamaModel
from impls.models.source import ModelSource, open_model
from impls.models.synthetic import SyntheticWeights
from impls.precision.bf16 import Bf16
from impls.precision.fp32 import Fp32
from impls.seams import LinearMethod

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_unavailable()}")


@pytest.fixture(scope="module")
def tiny() -> ModelSource:
    return open_model(yaml.safe_load((Path(__file__).parents[2] / "conf/model/tiny.yaml").read_text()))


def block(x: torch.Tensor) -> list[torch.Tensor]:
    """Every operator once, on [4, 24]."""
    weight, table = torch.linspace(-1, 1, 24, dtype=x.dtype), torch.linspace(-1, 1, 24).view(4, 1, 6)
    total = x * 2
    normed = ops.add_rms_norm(total, x, weight, 1e-5)
    return [
        ops.rms_norm(x, weight, 1e-5),
        total,
        normed,
        ops.silu_and_mul(x),
        ops.rotate(x.view(4, 4, 6), table, table),
    ]


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the C kernels are called from here on."""
    seen: list[str] = []

    def recorded(name: str, kernel: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
        seen.append(name)
        return kernel(*arguments)

    for name in ("rms_norm", "add_rms_norm", "silu_and_mul", "rotate"):
        monkeypatch.setattr(native, name, partial(recorded, name, getattr(native, name)))
    return seen


@needs_native
def test_fp32_rows_go_to_the_kernels_and_bf16_and_traced_ones_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(1))
    seen = calls(monkeypatch)
    fused = block(x)
    assert seen == ["add_rms_norm", "rms_norm", "silu_and_mul", "rotate"]
    traced = torch.compile(block, backend="eager", fullgraph=True)(x)
    half = block(x.bfloat16())
    with monkeypatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        plain = block(x)
    assert len(seen) == 4, "bf16, traced or compiler-less rows reached an FP32 kernel"
    for a, b, c, d in zip(fused, plain, traced, half, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert torch.equal(b, c)
        torch.testing.assert_close(d.float(), b, rtol=0.03, atol=0.03)
        assert d.dtype == torch.bfloat16


@needs_native
def test_the_model_says_the_same_with_and_without_kernels(tiny: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaModel(tiny.shape, tiny.weights(), Fp32(CPU), CPU)
    ids = [int(id) for id in torch.randint(0, 500, (60,), generator=torch.Generator().manual_seed(2))]
    seen = calls(monkeypatch)
    fused = stepwise_logits(model, ids, 50, 9, 1)
    assert set(seen) == {"add_rms_norm", "rms_norm", "silu_and_mul", "rotate"}
    monkeypatch.setattr(native, "available", lambda: False)
    assert relative_error(fused, stepwise_logits(model, ids, 50, 9, 1)) < 1e-5


@pytest.mark.parametrize("kernel", ["native_bf16", "onednn_fp32_scratch", "fp32"])
def test_a_tied_table_is_resident_once(tiny: ModelSource, kernel: str) -> None:
    if kernel == "native_bf16" and (why := native.why_unavailable()):
        pytest.skip(f"no native kernels: {why}")
    method: LinearMethod = Fp32(CPU) if kernel == "fp32" else Bf16(CPU, kernel=kernel)
    shape = replace(tiny.shape, tie_embeddings=True)
    weights = SyntheticWeights(shape, 0)
    assert shape.vocab_size % 16 == 0, "a padded panel would need its own sum"
    norms = sum(weights[name].numel() for name in weights if "norm" in name)
    others = sum(weights[name].numel() for name in weights if "norm" not in name)
    model = LlamaModel(shape, weights, method, CPU)
    assert model.weights_bytes == 4 * norms + (4 if kernel == "fp32" else 2) * others
    ids = list(range(40))
    exact = stepwise_logits(LlamaModel(shape, weights, Fp32(CPU), CPU), ids, 40)
    assert relative_error(stepwise_logits(model, ids, 40), exact) < 0.05, "BF16 rounding cannot explain this"
