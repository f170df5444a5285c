"""int8 and fp8: what is multiplied is exactly the rounded weights and the rounded activations that are documented."""

from __future__ import annotations

import pytest
import torch

from impls.precision import int8
from impls.precision.bf16 import Bf16
from impls.precision.fp8 import Fp8
from impls.precision.int8 import Int8
from impls.precision.w8a8 import W8A8, quantize_int8, round_to_e4m3, symmetric_scale
from impls.seams import Arm, ModelShape

CPU = torch.device("cpu")
INT8_KERNELS = [k for k in int8.KERNELS if int8.why_not(k, CPU) is None]
SHAPES = [(1, 576, 64), (0, 64, 48), (3, 33, 17), (7, 577, 96), (33, 128, 1)]


def tensors(rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows * 1000 + k + n)
    return torch.randn(rows, k, generator=g), torch.randn(n, k, generator=g), torch.randn(n, generator=g)


def methods() -> list[W8A8]:
    return [Int8(CPU, kernel=k) for k in INT8_KERNELS] + [Fp8(CPU, granularity=g) for g in ("row", "tensor")]


METHODS = pytest.mark.parametrize(
    "method", methods(), ids=lambda m: f"{m.name}-{m.kernel}-{getattr(m, 'granularity', 'row')}"
)


@METHODS
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_apply_is_the_product_of_the_rounded_numbers(rows: int, k: int, n: int, with_bias: bool, method: W8A8) -> None:
    x, w, b = tensors(rows, k, n)
    packed = method.pack(w, b if with_bias else None)
    x = x.to(method.activation_dtype)
    y = method.apply(x, packed)
    assert y.dtype == method.activation_dtype and y.shape == (rows, n)
    if rows:
        values, scale = method.quantize_activations(x)
        rounded = values.double() * scale.double()
        expected = rounded @ method.dequantize(packed).double().T + (b.double() if with_bias else 0.0)
        tolerance = 1e-5 if y.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=10 * tolerance)


@METHODS
def test_the_stages_compose_to_apply(method: W8A8) -> None:
    x, w, b = tensors(9, 80, 48)
    packed, x = method.pack(w, b), x.to(method.activation_dtype)
    values, scale = method.quantize_activations(x)
    assert values.dtype.itemsize == 1 and scale.dtype == torch.float32
    y = method.rescale(method.matmul(values, packed), scale, packed)
    if method.kernel == "native_int8":  # one fused call, whose last addition may round once less
        torch.testing.assert_close(y, method.apply(x, packed), rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(y, method.apply(x, packed))


@METHODS
def test_zero_rows_and_zero_weights_give_zeros_not_nan(method: W8A8) -> None:
    x, w, _ = tensors(4, 32, 16)
    x[1] = 0
    w[3] = 0
    y = method.apply(x.to(method.activation_dtype), method.pack(w))
    assert torch.isfinite(y).all() and not y[1].any() and not y[:, 3].any() and y[0, 0] != 0


@METHODS
def test_the_head_stays_bf16(method: W8A8) -> None:
    head = method.head_method()
    assert isinstance(head, Bf16) and head.activation_dtype == method.activation_dtype


@pytest.mark.parametrize("kernel", INT8_KERNELS)
def test_int8_products_are_exact_integers(kernel: str) -> None:
    """Worst case: every value at the edge, the longest row that FP32 sums exactly."""
    method = Int8(CPU, kernel=kernel)
    sign = torch.where(torch.arange(1040) % 2 == 0, 1.0, -1.0)
    packed = method.pack(torch.stack([sign, torch.ones(1040)]) * 3.0)
    values, _ = method.quantize_activations(torch.stack([sign, -sign]) * 7.0)
    assert values.abs().unique().tolist() == [127]
    products = method.matmul(values, packed).long()
    assert products.tolist() == [[1040 * 127 * 127, 0], [-1040 * 127 * 127, 0]]


def test_int8_quantisation_saturates_symmetrically() -> None:
    values, scale = quantize_int8(torch.tensor([[-254.0, 254.0, 1.0, -1.0, 0.0], [1e-3, -1e-3, 0, 0, 0]]))
    assert values.tolist() == [[-127, 127, 0, 0, 0], [127, -127, 0, 0, 0]]
    torch.testing.assert_close(scale, torch.tensor([[2.0], [1e-3 / 127]]))


def test_e4m3_rounding_is_the_cast_and_clamps_before_it() -> None:
    x = torch.linspace(-700, 700, 4001)
    rounded = round_to_e4m3(x, torch.ones(())).float()
    inside = x.abs() <= 448
    assert torch.equal(rounded[inside], x[inside].to(torch.float8_e4m3fn).float())
    assert rounded[x > 448].unique().tolist() == [448.0] and rounded[x < -448].unique().tolist() == [-448.0]


def test_fp8_scale_maps_the_peak_to_the_largest_number() -> None:
    x = torch.tensor([[1.0, -2.0], [0.25, 0.125]])
    assert symmetric_scale(x, 448.0, dim=1).flatten().tolist() == pytest.approx([2 / 448, 0.25 / 448])
    assert symmetric_scale(x, 448.0, dim=None).item() == pytest.approx(2 / 448)
    method = Fp8(CPU, granularity="tensor")
    values, scale = method.quantize_activations(x.to(method.activation_dtype))
    assert values.float().abs().max() == 448 and scale.numel() == 1


def test_only_row_granularity_ignores_the_batch() -> None:
    x, w, _ = tensors(2, 64, 16)
    x[1] *= 1000
    for granularity, same in (("row", True), ("tensor", False)):
        method = Fp8(CPU, granularity=granularity)
        packed, rows = method.pack(w), x.to(method.activation_dtype)
        alone, together = method.apply(rows[:1], packed), method.apply(rows, packed)[:1]
        assert torch.allclose(alone, together, rtol=1e-5) == same


def test_what_is_emulated_is_said() -> None:
    assert "E4M3" in str(Fp8(CPU).emulated) and Fp8(CPU).kernel.startswith("emulated_")
    assert "INT8" in str(Int8(CPU, kernel="onednn_fp32_scratch").emulated)
    assert Int8(CPU, kernel="onednn_int8").emulated is None
    packed = Int8(CPU, kernel="onednn_int8").pack(torch.randn(24, 40))
    assert packed.num_bytes() == 24 * 40 + 4 * 24


def arm(device: str, hidden: int, **precision: object) -> Arm:
    shape = ModelShape(256, hidden, 64, 2, 2, 1, 16, 128)
    return Arm({"precision": precision}, shape, 128, device, 1 << 20)


def test_validate_gives_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Int8.validate(arm("cpu", 36)) == [] and Fp8.validate(arm("cpu", 36)) == []
    assert Int8.validate(arm("cuda", 36)) == ["hidden_size=36 must be a multiple of 8"]
    assert "not a kernel for device cpu" in Int8.validate(arm("cpu", 32, kernel="cublas_int8"))[0]
    assert "must be one of row, tensor" in Fp8.validate(arm("cpu", 32, granularity="column"))[0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert Fp8.validate(arm("cuda", 40, granularity="tensor")) == ["hidden_size=40 must be a multiple of 16"]
    assert "compute capability 9.0" in Fp8.validate(arm("cuda", 32))[0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert Fp8.validate(arm("cuda", 40)) == []
