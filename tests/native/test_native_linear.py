"""The C linear kernels against FP64, at every register-blocking case and at odd edges."""

from __future__ import annotations

import pytest
import torch

from impls import native
from impls.precision.w8a8 import quantize_int8

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


@pytest.mark.parametrize(("k", "n"), [(2, 1), (1, 16), (33, 17), (577, 200)])
def test_int8_sums_are_exact_at_every_tile_height(k: int, n: int) -> None:
    g = torch.Generator().manual_seed(k + n)
    weight = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
    for rows in (*range(14), 31):
        values = torch.randint(-127, 128, (rows, k), generator=g, dtype=torch.int8)
        sums = native.matmul_int8(values, native.pack_panels(weight), n)
        assert torch.equal(sums.long(), values.long() @ weight.long().T)


def test_int8_sums_do_not_saturate() -> None:
    """Every product at its largest: a 16-bit intermediate or an FP32 accumulator would show."""
    ones = torch.full((1, 4097), 127, dtype=torch.int8)
    sums = native.matmul_int8(ones, native.pack_panels(torch.cat([ones, -ones])), 2)
    assert sums.tolist() == [[4097 * 127 * 127, -4097 * 127 * 127]]


@pytest.mark.parametrize("k", [1, 7, 8, 33, 576])
def test_int8_quantisation_has_torchs_bits(k: int) -> None:
    x, _, _ = tensors(40, k, 1)
    x[3] = 0
    x[5] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]).repeat(k)[:k]  # scale 1: ties
    values, scale = native.quantize_int8(x)
    expected, expected_scale = quantize_int8(x)
    assert torch.equal(values, expected) and torch.equal(scale, expected_scale)


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_int8_is_its_three_stages(with_bias: bool) -> None:
    for rows, k, n in ((0, 8, 8), (1, 576, 200), (13, 33, 17), (40, 64, 31)):
        x, w, b = tensors(rows, k, n)
        values, scale = quantize_int8(w)
        packed = native.pack_panels(values)
        y = native.linear_int8(x, packed, scale.view(-1), n, b if with_bias else None)
        x_values, x_scale = native.quantize_int8(x)
        expected = native.matmul_int8(x_values, packed, n).double() * x_scale.double() * scale.double().T
        expected = expected + (b.double() if with_bias else 0.0)
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


def test_wrong_int8_tensors_are_refused_by_name() -> None:
    x, w, _ = tensors(4, 32, 16)
    values, scale = quantize_int8(w)
    packed = native.pack_panels(values)
    with pytest.raises(ValueError, match=r"scale must be contiguous FP32 \[16\]"):
        native.linear_int8(x, packed, scale, 16)
    with pytest.raises(ValueError, match=r"the weight must be torch\.int8"):
        native.linear_int8(x, packed.bfloat16(), scale.view(-1), 16)
    with pytest.raises(ValueError, match="values must be contiguous INT8"):
        native.matmul_int8(x, packed, 16)
    with pytest.raises(ValueError, match="x must be contiguous FP32"):
        native.quantize_int8(x.T)
