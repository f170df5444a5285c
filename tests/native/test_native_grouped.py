"""The C kernel of grouped weights against FP64, for every width, row count, group and ragged edge."""

from __future__ import annotations

import pytest
import torch

from impls import native
from impls.native import grouped as layout

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_unavailable()}")


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def weights(n: int, k: int, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every level, both ends included; scales and offsets that FP16 holds."""
    g = torch.Generator().manual_seed(n * 7 + k + bits)
    values = torch.randint(0, 1 << bits, (n, k), generator=g).to(torch.uint8)
    values[:, 0], values[:, -1] = 0, (1 << bits) - 1
    scale, offset = (torch.randn(n, k // group, generator=g).half().float() for _ in range(2))
    return values, scale, offset


def dense(values: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, zero_point: bool) -> torch.Tensor:
    n, k = values.shape
    v = values.double().view(n, scale.shape[1], -1)
    s, o = scale.double()[..., None], offset.double()[..., None]
    return (s * (v - o) if zero_point else s * v + o).reshape(n, k)


@pytest.mark.parametrize("bits", layout.BITS)
@pytest.mark.parametrize(
    ("n", "k", "group"),
    [(1, 32, 32), (17, 96, 32), (200, 192, 64), (31, 384, 128), (48, 577, 577), (16, 5, 5), (33, 300, 300)],
)
def test_linear_grouped_at_every_tile_height(bits: int, n: int, k: int, group: int) -> None:
    values, scale, offset = weights(n, k, group, bits)
    words, scales = layout.pack_fields(values, bits, group), layout.pack_scales(scale, offset)
    for rows in (*range(10), 13, 31, 97, 130):
        g = torch.Generator().manual_seed(rows)
        x, bias = torch.randn(rows, k, generator=g), torch.randn(n, generator=g) if rows % 2 else None
        zero_point = rows % 3 == 0
        y = native.linear_grouped(
            x, words, scales, n, bits=bits, group_size=group, zero_point=zero_point, bias=bias
        )
        w = dense(values, scale, offset, zero_point)
        expected = x.double() @ w.T + (0.0 if bias is None else bias.double())
        size = x.double().abs() @ (scale.double().abs().repeat_interleave(k // scale.shape[1], 1) * (1 << bits)).T
        assert ((y.double() - expected).abs() <= 3e-6 * size + 1e-5).all(), (rows, float((y - expected).abs().max()))


@pytest.mark.parametrize(
    ("n", "k", "group"), [(1, 32, 32), (17, 96, 32), (200, 192, 64), (31, 384, 128), (48, 577, 577), (16, 5, 5)]
)
def test_linear_w4a8_is_exact_within_a_group(n: int, k: int, group: int) -> None:
    """Against integer sums: extreme rows too, whose products fill the 16 bits in which some are added up."""
    values, scale, offset = weights(n, k, group, 4)
    values[-1] = 15
    words, scales = layout.pack_fields(values, 4, group), layout.pack_scales(scale, offset)
    for rows in (1, 2, 3, 4, 5, 7, 9, 33):
        g = torch.Generator().manual_seed(rows)
        x, bias = torch.randn(rows, k, generator=g), torch.randn(n, generator=g) if rows % 2 else None
        x[0] = 3.0  # every integer 127
        x[-1] = torch.where(torch.arange(k) % 3 == 0, -2.0, 2.0)
        rounded, x_scale = native.quantize_int8(x)
        assert rows == 1 or rounded[0].tolist() == [127] * k
        y = native.linear_w4a8(x, words, scales, n, group_size=group, bias=bias)
        by_group = rounded.long().view(rows, -1, group)
        sums = torch.einsum("rgk,ngk->rng", by_group, values.long().view(n, -1, group)).double()
        parts = sums * scale.double() + by_group.sum(-1)[:, None].double() * offset.double()
        expected = parts.sum(-1) * x_scale.double() + (0.0 if bias is None else bias.double())
        size = (sums * scale.double()).abs().sum(-1) + (by_group.sum(-1)[:, None] * offset).abs().sum(-1)
        assert ((y.double() - expected).abs() <= 1e-6 * size * x_scale + 1e-6).all(), rows


@pytest.mark.parametrize("bits", layout.BITS)
@pytest.mark.parametrize(("n", "k", "group"), [(1, 32, 32), (17, 96, 32), (4113, 64, 64), (48, 577, 577), (16, 5, 5)])
def test_packing_is_undone_exactly(bits: int, n: int, k: int, group: int) -> None:
    values, scale, offset = weights(n, k, group, bits)
    ids = torch.arange(n).flip(0)
    words = layout.channels(layout.pack_fields(values, bits, group), ids)
    assert torch.equal(layout.unpack_fields(words, bits, group, k), values[ids])
    found = layout.unpack_scales(layout.channels(layout.pack_scales(scale, offset), ids))
    assert torch.equal(found[0], scale[ids]) and torch.equal(found[1], offset[ids])


def test_a_weight_takes_its_bits_and_no_more() -> None:
    for bits in layout.BITS:
        values, scale, offset = weights(64, 256, 64, bits)
        words, scales = layout.pack_fields(values, bits, 64), layout.pack_scales(scale, offset)
        assert words.numel() * 32 == values.numel() * bits and scales.numel() == scale.numel()


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("zero_point", [False, True])
def test_every_half_float_scales_as_torch_widens_it(rows: int, zero_point: bool) -> None:
    """Denormals, infinities and NaN included: the kernel widens FP16 by hand."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    scale = halves.float().view(-1, 1)
    n = len(scale)
    one, zero = torch.ones(n, 32, dtype=torch.uint8), torch.zeros(n, 1)
    words, scales = layout.pack_fields(one, 4, 32), layout.pack_scales(scale, zero)
    y = native.linear_grouped(
        torch.full((rows, 32), 1 / 32), words, scales, n, bits=4, group_size=32, zero_point=zero_point
    )
    expected = scale.view(1, n).expand(rows, n)
    if zero_point:  # -infinity * 0 is no number
        expected = torch.where(expected.isinf(), torch.nan, expected)
    assert torch.equal(y.nan_to_num(7e7), expected.nan_to_num(7e7)) and torch.equal(y.isnan(), expected.isnan())


def test_wrong_tensors_are_refused_by_name() -> None:
    values, scale, offset = weights(16, 64, 32, 4)
    words, scales = layout.pack_fields(values, 4, 32), layout.pack_scales(scale, offset)
    x = torch.randn(2, 64)
    good = {"bits": 4, "group_size": 32}
    assert native.linear_grouped(x, words, scales, 16, bits=4, group_size=32).shape == (2, 16)
    with pytest.raises(ValueError, match="x must be contiguous FP32"):
        native.linear_grouped(x.bfloat16(), words, scales, 16, **good)
    with pytest.raises(ValueError, match="words must be contiguous int32"):
        native.linear_grouped(x, words[:, 1:], scales, 16, **good)
    with pytest.raises(ValueError, match="scales must be contiguous int32"):
        native.linear_grouped(x, words, scales.float(), 16, **good)
    with pytest.raises(ValueError, match="words must be contiguous int32"):
        native.linear_w4a8(x, layout.pack_fields(values, 8, 32), scales, 16, group_size=32)
    with pytest.raises(ValueError, match="no kernel for 5 bits"):
        native.linear_grouped(x, words, scales, 16, bits=5, group_size=32)
    with pytest.raises(ValueError, match="in groups of 48 of 64"):
        native.linear_grouped(x, words, scales, 16, bits=4, group_size=48)
    with pytest.raises(ValueError, match=r"bias must be contiguous FP32 \[16\]"):
        native.linear_grouped(x, words, scales, 16, bias=torch.ones(3), **good)
