"""The C linear kernels against FP64, at every register-blocking case and at odd edges."""

from __future__ import annotations

import pytest
import torch

from impls import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_unavailable()}")


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def tensors(rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows * 1000 + k + n)
    return torch.randn(rows, k, generator=g), torch.randn(n, k, generator=g), torch.randn(n, generator=g)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("k", "n"), [(2, 1), (1, 16), (33, 17), (64, 31), (577, 200), (1536, 576)])
def test_linear_bf16_at_every_tile_height(k: int, n: int, with_bias: bool) -> None:
    for rows in (*range(16), 31, 95):
        x, w, b = tensors(rows, k, n)
        w = w.bfloat16()
        y = native.linear_bf16(x, native.pack_panels(w), n, b if with_bias else None)
        expected = x.double() @ w.double().T + (b.double() if with_bias else 0.0)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=3e-4)


def test_a_row_is_the_same_whatever_shares_its_batch() -> None:
    """Each output is one chain of additions over k, so its bits do not depend on the number of rows."""
    x, w, _ = tensors(40, 96, 80)
    packed = native.pack_panels(w.bfloat16())
    together = native.linear_bf16(x, packed, 80)
    for rows in range(1, 14):
        assert torch.equal(native.linear_bf16(x[:rows], packed, 80), together[:rows])


@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 2), (33, 7), (576, 64)])
def test_packing_is_undone_exactly(n: int, k: int) -> None:
    weight = torch.randn(n, k).bfloat16()
    assert torch.equal(native.unpack_panels(native.pack_panels(weight), n, k), weight)


def test_wrong_tensors_are_refused_by_name() -> None:
    x, w, b = tensors(4, 32, 16)
    packed = native.pack_panels(w.bfloat16())
    with pytest.raises(ValueError, match=r"x must be contiguous FP32 .* not torch.float32 \[4, 16\] .* strides"):
        native.linear_bf16(x[:, ::2], packed, 16)
    with pytest.raises(ValueError, match="x must be contiguous FP32"):
        native.linear_bf16(x.bfloat16(), packed, 16)
    with pytest.raises(ValueError, match=r"the weight must be torch\.bfloat16 from pack_panels"):
        native.linear_bf16(x, w.bfloat16(), 16)
    with pytest.raises(ValueError, match="the weight must be"):
        native.linear_bf16(x, packed, 64)
    with pytest.raises(ValueError, match=r"bias must be contiguous FP32 \[16\]"):
        native.linear_bf16(x, packed, 16, b[:3])
