"""The C kernels between the matrix products against the torch formulas, in FP64 where numbers are compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from impls import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_unavailable()}")

ROWS, WIDTHS = (0, 1, 3, 300), (1, 7, 31, 33, 96, 577)  # 300 rows of 577: more than one thread gets work
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def apart(x: Tensor, gap: int = 5) -> Tensor:
    """The same rows, ``gap`` NaNs between two of them."""
    rows = torch.full((x.shape[0], x.shape[1] + gap), NAN)
    rows[:, : x.shape[1]] = x
    return rows[:, : x.shape[1]]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-6, atol=1e-6)


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), eps)


def swiglu64(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    return F.silu(gate) * up


def rotated64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.double().chunk(2, -1)
    return x * cos.double() + torch.cat((high, low), -1) * sin.double()


@pytest.mark.parametrize("layout", [torch.clone, apart])
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_and_fused_residual(width: int, layout: Callable[[Tensor], Tensor]) -> None:
    for rows in ROWS:
        x, weight, residual = draw(rows, width), draw(width), draw(rows, width).mul(3)
        close(native.rms_norm(layout(x), weight, 1e-5), norm64(x, weight, 1e-5))
        total = x.clone()
        found = native.add_rms_norm(total, layout(residual), weight, 1e-3)
        assert torch.equal(total, x + residual), "the sum must stay in x"
        close(found, norm64(total, weight, 1e-3))


@pytest.mark.parametrize("layout", [torch.clone, apart])
@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu(width: int, layout: Callable[[Tensor], Tensor]) -> None:
    for rows in ROWS:
        x = draw(rows, 2 * width).mul(4)
        close(native.silu_and_mul(layout(x)), swiglu64(x))


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 6), (5, 64), (12, 34)])
def test_rotation_of_the_first_heads_of_fused_rows(heads: int, dim: int) -> None:
    for rows in ROWS:
        fused, cos, sin = draw(rows, heads + 2, dim), draw(rows, 1, dim), draw(rows, 1, dim + 2)[..., 2:].contiguous()
        close(native.rotate(fused[:, :heads], cos, sin), rotated64(fused[:, :heads], cos, sin))
        close(native.rotate(fused[:, ::2], cos, sin), rotated64(fused[:, ::2], cos, sin))


def test_a_row_is_the_same_whatever_shares_its_batch() -> None:
    x, table = draw(300, 580), draw(300, 1, 58)
    whole = (native.rms_norm(x, x[0], 1e-5), native.silu_and_mul(x), native.rotate(x.view(300, 10, 58), table, table))
    for row in (0, 150, 299):
        one, angle = x[row : row + 1], table[row : row + 1]
        alone = (native.rms_norm(one, x[0], 1e-5), native.silu_and_mul(one))
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, whole[:2], strict=True))
        assert torch.equal(native.rotate(one.view(1, 10, 58), angle, angle)[0], whole[2][row])


@pytest.mark.parametrize("at", [0, 17, 36])  # 36: past the last whole vector
@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38, -3e38, 1e-42, 0.0, -100.0, 100.0])
def test_extreme_values_end_as_torchs(value: float, at: int) -> None:
    """NaN and infinity where torch has them and nowhere else; nothing overflows that torch does not."""
    x, weight = draw(3, 37), draw(37)
    x[1, at] = value
    torch.testing.assert_close(
        native.rms_norm(x, weight, 1e-5), F.rms_norm(x, (37,), weight, 1e-5), equal_nan=True, rtol=1e-5, atol=1e-6
    )
    both = torch.cat((x, draw(3, 37)), -1)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(native.silu_and_mul(both), F.silu(gate) * up, equal_nan=True, rtol=1e-5, atol=1e-6)
    heads, ones = x[:, 1:].view(3, 2, 18), torch.ones(3, 1, 18)
    low, high = heads.chunk(2, -1)
    torch.testing.assert_close(
        native.rotate(heads, ones, ones), heads + torch.cat((high, low), -1), equal_nan=True, rtol=1e-5, atol=1e-6
    )


def test_silu_over_its_whole_range() -> None:
    gate = torch.linspace(-120, 120, 4001)[None]
    found = native.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), -1))
    torch.testing.assert_close(found.double(), F.silu(gate.double()), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 2), (33, 7), (200, 577)])
def test_rows_are_read_back_from_the_packed_layout(n: int, k: int) -> None:
    weight = draw(n, k).bfloat16()
    for count in (0, 1, 90):
        ids = torch.randint(0, n, (count,), generator=torch.Generator().manual_seed(n))
        assert torch.equal(native.rows_bf16(native.pack_panels(weight), ids, n, k), weight[ids].float())


def test_wrong_tensors_are_refused_by_name() -> None:
    x, weight, table = draw(4, 32), draw(32), draw(4, 1, 8)
    for wrong in (x.bfloat16(), x.T, x[0]):
        with pytest.raises(ValueError, match=r"x must be FP32 \[rows, K\] on the CPU, dense in K"):
            native.rms_norm(wrong, weight, 1e-5)
        with pytest.raises(ValueError, match=r"gate_up must be FP32 \[rows, K\]"):
            native.silu_and_mul(wrong)
    with pytest.raises(ValueError, match=r"weight must be contiguous FP32 \[32\]"):
        native.rms_norm(x, weight[:31], 1e-5)
    with pytest.raises(ValueError, match=r"x must be contiguous FP32 \[3, 32\]"):
        native.add_rms_norm(x, x[:3], weight, 1e-5)
    with pytest.raises(ValueError, match="x must be contiguous"):
        native.add_rms_norm(apart(x), x, weight, 1e-5)
    with pytest.raises(ValueError, match="as many gates as ups, not 31"):
        native.silu_and_mul(x[:, :31])
    for wrong in (x, x.view(4, 4, 8).bfloat16(), x.view(4, 8, 4).mT, draw(4, 4, 7)):
        with pytest.raises(ValueError, match=r"x must be FP32 \[T, heads, D\]"):
            native.rotate(wrong, table, table)
    with pytest.raises(ValueError, match=r"sin must be contiguous FP32 \[4, 1, 8\]"):
        native.rotate(x.view(4, 4, 8), table, table[:3])
    packed = native.pack_panels(draw(20, 6).bfloat16())
    for id in (-1, 20):
        with pytest.raises(IndexError, match=r"outside 0\.\.19"):
            native.rows_bf16(packed, torch.tensor([3, id]), 20, 6)
    with pytest.raises(ValueError, match="ids must be contiguous int64"):
        native.rows_bf16(packed, torch.tensor([3], dtype=torch.int32), 20, 6)
    with pytest.raises(ValueError, match="the weight must be"):
        native.rows_bf16(packed, torch.tensor([3]), 20, 8)


def test_torch_compile_keeps_the_lookup_in_its_graph() -> None:
    packed, ids = native.pack_panels(draw(20, 6).bfloat16()), torch.tensor([3, 19, 0])

    def embed(ids: Tensor) -> Tensor:
        return native.rows_bf16(packed, ids, 20, 6) * 2

    assert torch.equal(torch.compile(embed, backend="eager", fullgraph=True)(ids), embed(ids))
