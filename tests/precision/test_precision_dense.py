"""fp32 and bf16: every kernel that this machine can run, against an FP64 product with the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from impls.precision import gemm
from impls.precision.bf16 import Bf16
from impls.precision.fp32 import Fp32
from impls.precision.gemm import BF16_KERNELS, why_not

CPU = torch.device("cpu")
SHAPES = [(1, 576, 64), (0, 64, 48), (3, 33, 17), (7, 577, 96), (33, 128, 1), (129, 96, 31)]
RUNNABLE = [k for k in BF16_KERNELS if why_not(k, CPU) is None]


def tensors(rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows * 1000 + k + n)
    return torch.randn(rows, k, generator=g), torch.randn(n, k, generator=g), torch.randn(n, generator=g)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_fp32_matches_the_exact_product(rows: int, k: int, n: int, with_bias: bool) -> None:
    x, w, b = tensors(rows, k, n)
    method = Fp32(CPU)
    packed = method.pack(w, b if with_bias else None)
    y = method.apply(x, packed)
    assert y.dtype == torch.float32 and y.shape == (rows, n)
    assert torch.equal(method.dequantize(packed), w)
    torch.testing.assert_close(y.double(), exact(x, w, b if with_bias else None), rtol=1e-5, atol=1e-4)
    assert packed.num_bytes() == 4 * n * k


@pytest.mark.parametrize("kernel", RUNNABLE)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_bf16_matches_the_exact_product_of_its_own_weights(
    rows: int, k: int, n: int, with_bias: bool, kernel: str
) -> None:
    x, w, b = tensors(rows, k, n)
    method = Bf16(CPU, kernel=kernel)
    packed = method.pack(w, b if with_bias else None)
    x = x.to(method.activation_dtype)
    y = method.apply(x, packed)
    assert y.dtype == method.activation_dtype and y.shape == (rows, n)
    assert torch.equal(method.dequantize(packed), w.bfloat16().float())
    tolerance = 1e-5 if method.activation_dtype == torch.float32 else 1e-2
    expected = exact(x, w.bfloat16(), None if packed.bias is None or not with_bias else packed.bias)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=10 * tolerance)
    padded = -(-n // 16) * 16 * (k + k % 2)  # kernel layouts may pad a panel
    assert 2 * n * k <= packed.num_bytes() <= 2 * padded


@pytest.mark.parametrize("kernel", ["fp32", *RUNNABLE])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 33), (64, 576)])
def test_a_tied_embedding_reads_the_rows_that_the_head_multiplies_with(kernel: str, n: int, k: int) -> None:
    _, weight, _ = tensors(1, k, n)
    method = Fp32(CPU) if kernel == "fp32" else Bf16(CPU, kernel=kernel)
    packed, ids = method.pack(weight), torch.tensor([n - 1, 0, n // 2, 0])
    rows = method.rows(packed, ids)
    if kernel == "onednn_bf16":  # blocked: the model keeps a second table
        assert rows is None
        return
    assert rows is not None and rows.dtype == method.activation_dtype and rows.is_contiguous()
    before = method.dequantize(packed).clone()
    assert torch.equal(rows.float(), before[ids])
    rows += 1  # the residual stream is added to in place
    assert torch.equal(method.dequantize(packed), before)
    with pytest.raises(IndexError):
        method.rows(packed, torch.tensor([n]))


def test_a_scratch_smaller_than_the_weights_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = tensors(5, 40, 100)
    monkeypatch.setattr(gemm, "SCRATCH_ELEMENTS", 40 * 7)
    method = Bf16(CPU, kernel="onednn_fp32_scratch")
    y = method.apply(x, method.pack(w, b))
    torch.testing.assert_close(y.double(), exact(x, w.bfloat16(), b), rtol=1e-5, atol=1e-4)


def test_an_unknown_kernel_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"kernel=fast: must be auto or one of .*onednn_fp32_scratch"):
        Bf16(CPU, kernel="fast")
    with pytest.raises(ValueError, match="not a kernel for device cpu"):
        Bf16(CPU, kernel="cublas_bf16")


@pytest.mark.parametrize("method", [Fp32(CPU), Bf16(CPU)], ids=["fp32", "bf16"])
def test_a_row_does_not_depend_on_the_weights_of_another_layer(method: Fp32 | Bf16) -> None:
    """The scratch is shared between layers: a larger layer in between must leave no trace."""
    x, w, _ = tensors(2, 64, 48)
    _, other, _ = tensors(2, 64, 96)
    first, second = method.pack(w), method.pack(other)
    x = x.to(method.activation_dtype)
    before = method.apply(x, first)
    method.apply(x, second)
    assert torch.equal(before, method.apply(x, first))
