"""What the gguf precision refused, as it takes no weights but blocks: a probe of its speed without a model, and draft
heads, which were trained after the file was made."""

from __future__ import annotations

import pytest
import torch

from harness.arm import option
from harness.compose import options
from harness.probe import gemm_flops_per_s
from impls.build import construct

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", options("precision"))
def test_its_gemm_can_be_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.probe.gemm_sizes", lambda device: (4, 128))
    method = construct(option("precision", name), device=CPU)

    def once(work, device):
        assert work().shape == (4, 128)
        return 0.5

    assert gemm_flops_per_s("cpu", method, once) == 2 * 2 * 4 * 128**2


@pytest.mark.parametrize("name", options("precision"))
def test_a_draft_head_can_be_packed(name: str) -> None:
    head = construct(option("precision", name), device=CPU).draft_head_method()
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    packed = head.pack(weight, torch.ones(128))
    torch.testing.assert_close(head.dequantize(packed), weight, rtol=0.01, atol=0.01)
    assert torch.isfinite(head.apply(torch.ones(2, 128, dtype=head.activation_dtype), packed)).all()
