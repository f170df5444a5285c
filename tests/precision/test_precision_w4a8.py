"""w4a8: the weights of int4, multiplied by activations that are rounded to INT8 token by token, whatever the kernel."""

from __future__ import annotations

import pytest
import torch

from impls.precision import w4a8
from impls.precision.w4a8 import W4A8
from impls.precision.w8a8 import quantize_int8
from impls.precision.weight_only import Int4
from impls.seams import Arm, ModelShape

CPU = torch.device("cpu")
KERNELS = [kernel for kernel in w4a8.KERNELS if w4a8.why_no_kernel(kernel, CPU) is None]
CASES = pytest.mark.parametrize("method", [W4A8(CPU, group, 16, k) for k in KERNELS for group in (None, 32, 64)],
                                ids=lambda m: f"{m.kernel}-{m.group_size}")  # fmt: skip


def tensors(rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows * 1000 + k + n)
    return torch.randn(rows, k, generator=g), torch.randn(n, k, generator=g), torch.randn(n, generator=g)


@CASES
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 576, 64), (0, 64, 48), (3, 128, 17), (9, 192, 1), (33, 384, 200)])
def test_apply_is_the_product_of_the_rounded_numbers(rows: int, k: int, n: int, with_bias: bool, method: W4A8) -> None:
    x, w, b = tensors(rows, k, n)
    packed, x = method.pack(w, b if with_bias else None), x.to(method.activation_dtype)
    y = method.apply(x, packed)
    assert y.dtype == method.activation_dtype and y.shape == (rows, n)
    if rows:
        values, scale = quantize_int8(x)
        rounded = values.double() * scale.double()
        expected = rounded @ method.dequantize(packed).double().T + (b.double() if with_bias else 0.0)
        tolerance = 1e-5 if y.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=20 * tolerance)
        assert not torch.allclose(y.double(), x.double() @ method.dequantize(packed).double().T, atol=1e-4)


@CASES
def test_weights_are_those_of_int4(method: W4A8) -> None:
    _, w, _ = tensors(1, 192, 33)
    other = Int4(CPU, method.group_size, kernel="dequantized")
    ours, theirs = method.pack(w), other.pack(w)
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in ("weight", "scale"))
    assert torch.equal(method.dequantize(ours), other.dequantize(theirs))
    ids = torch.tensor([32, 0, 7])
    rows = method.rows(ours, ids)
    assert rows is not None and torch.equal(rows.float(), method.dequantize(ours)[ids].to(rows.dtype).float())


@CASES
def test_a_row_does_not_depend_on_who_shares_its_step(method: W4A8) -> None:
    x, w, _ = tensors(9, 128, 40)
    x[3:] *= 1000
    packed, x = method.pack(w), x.to(method.activation_dtype)
    together = method.apply(x, packed)
    for row in (0, 2, 8):
        torch.testing.assert_close(method.apply(x[row : row + 1], packed)[0], together[row], rtol=1e-6, atol=1e-6)


def test_only_what_has_a_kernel_is_not_emulated() -> None:
    assert "INT8" in str(W4A8(CPU, kernel="dequantized").emulated)
    for kernel in set(KERNELS) - {"dequantized"}:
        assert W4A8(CPU, kernel=kernel).emulated is None
    assert W4A8(CPU).kernel == KERNELS[0]


def test_validate_gives_reasons() -> None:
    def reasons(device: str = "cpu", **precision: object) -> list[str]:
        shape = ModelShape(256, 576, 1536, 2, 9, 3, 64, 128)
        return W4A8.validate(Arm({"precision": precision}, shape, 128, device, 1 << 20))

    assert reasons(group_size=64) == [] == reasons(kernel="dequantized", device="cuda")
    assert "does not divide hidden_size=576" in reasons(group_size=128)[0]
    assert "must be auto or one of native_w4a8, triton_w4a8, dequantized" in reasons(kernel="native_grouped")[0]
    assert "not a kernel for device cuda" in reasons(kernel="native_w4a8", device="cuda")[0]
    with pytest.raises(ValueError, match="not a kernel for device"):
        W4A8(torch.device("meta"), kernel="native_w4a8")
