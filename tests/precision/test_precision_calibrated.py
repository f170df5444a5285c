"""gptq, awq and smoothquant against slow, obvious versions of themselves, and against rounding to nearest."""

from __future__ import annotations

import pytest
import torch

from impls.precision.awq import Awq, input_factors
from impls.precision.gptq import DAMPING, Gptq, gptq, hessian
from impls.precision.grouped import asymmetric_grid, round_to_nearest
from impls.precision.int8 import Int8
from impls.precision.smoothquant import SmoothQuant
from impls.precision.weight_only import Int4
from impls.seams import Arm, ModelShape

CPU = torch.device("cpu")


def layer(n: int, k: int, tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and correlated inputs of which some are much larger than others, as a transformer's are."""
    g = torch.Generator().manual_seed(n + k)
    mixed = torch.randn(tokens, k, generator=g) @ torch.randn(k, k, generator=g) / k**0.5
    sizes = torch.rand(k, generator=g) ** 6 * 8 + 0.1
    return torch.randn(n, k, generator=g) / k**0.5, mixed * sizes


def output_error(w: torch.Tensor, rounded: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (w - rounded).T).square().mean())


@pytest.mark.parametrize(("bits", "group", "k"), [(4, 32, 96), (3, 64, 192), (2, 96, 96)])
def test_gptq_is_optimal_brain_quantisation_in_order(bits: int, group: int, k: int) -> None:
    """Against the definition: after each input the inverse Hessian of those that are left is computed anew, in FP64."""
    w, x = layer(24, k)
    found = gptq(w, hessian(x), bits, group)
    h = hessian(x).double()
    h += DAMPING * h.diagonal().mean() * torch.eye(k)
    left, values = w.double().clone(), torch.empty(24, k)
    for i in range(k):
        if i % group == 0:
            grid = asymmetric_grid(left[:, i : i + group].float(), bits, torch.float16)
            scale, offset = (each.double() for each in grid)
        level = ((left[:, i] - offset) / scale).round().clamp(0, (1 << bits) - 1)
        inverse = torch.linalg.inv(h[i:, i:])
        error = (left[:, i] - (scale * level + offset)) / inverse[0, 0]
        left[:, i:] -= error[:, None] * inverse[0]
        values[:, i] = level.float()
    # Where a number lies half-way between two levels FP32 and FP64 may part; all that follows would differ then.
    agreeing = (found.values == values).all(1)
    assert agreeing.float().mean() > 0.8, "more than ties differ"
    plain = round_to_nearest(w, bits, group).dequantize()
    assert output_error(w, found.dequantize(), x) < 0.9 * output_error(w, plain, x)


def test_gptq_of_inputs_that_tell_nothing_is_rounding_to_nearest() -> None:
    w, _ = layer(16, 256)
    found, nearest = gptq(w, torch.eye(256), 4, 64), round_to_nearest(w, 4, 64)
    assert torch.equal(found.values, nearest.values) and torch.equal(found.dequantize(), nearest.dequantize())


def test_gptq_survives_inputs_that_never_occur() -> None:
    w, x = layer(8, 64)
    x[:, 5] = 0
    x[:, 32:] = 0
    assert torch.isfinite(gptq(w, hessian(x), 4, 32).dequantize()).all()
    with pytest.raises(ValueError, match="group_size=48 does not divide in_features=64"):
        gptq(w, hessian(x), 4, 48)


def test_awq_makes_large_inputs_exact_first() -> None:
    w, x = layer(64, 256)
    factors = input_factors(w, x, 4, 64)
    large, small = x.abs().mean(0).topk(20).indices, x.abs().mean(0).topk(20, largest=False).indices
    assert factors[large].min() > factors[small].max()
    scaled = round_to_nearest(w * factors, 4, 64).dequantize() / factors
    assert output_error(w, scaled, x) < 0.8 * output_error(w, round_to_nearest(w, 4, 64).dequantize(), x)
    even = torch.randn(400, 256, generator=torch.Generator().manual_seed(1))
    even /= even.abs().mean(0)
    torch.testing.assert_close(input_factors(w, even, 4, 64), torch.ones(256), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [Gptq(CPU), Gptq(CPU, bits=3), Awq(CPU), Awq(CPU, kernel="dequantized")])
def test_apply_is_the_product_with_the_dequantised_weights(method: Gptq | Awq) -> None:
    w, x = layer(33, 128)
    bias = torch.randn(33)
    packed = method.pack_calibrated(w, x, bias)
    held_out = torch.randn(7, 128, generator=torch.Generator().manual_seed(2)).to(method.activation_dtype)
    y = method.apply(held_out, packed)
    expected = held_out.double() @ method.dequantize(packed).double().T + bias.double()
    tolerance = 1e-5 if y.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=20 * tolerance)
    plain = Int4(CPU, group_size=64)
    if method.bits == 4:
        assert output_error(w, method.dequantize(packed), x) < output_error(w, plain.dequantize(plain.pack(w)), x)


def smoothed(alpha: float = 0.5) -> tuple[SmoothQuant, torch.Tensor, torch.Tensor]:
    """With an input that is fifty times the others, as trained models have: it alone decides a token's INT8 scale."""
    w, x = layer(48, 128)
    x = x / x.abs().amax(0)
    x[:, 3] *= 50
    return SmoothQuant(CPU, alpha=alpha), w, x


def test_smoothquant_is_int8_of_what_it_has_smoothed() -> None:
    """By its formula: x / s through INT8, times w s; and all stages in turn are `apply`."""
    method, w, x = smoothed()
    bias = torch.randn(48, generator=torch.Generator().manual_seed(3))
    packed = method.pack_calibrated(w, x, bias)
    s = x.abs().amax(0).sqrt() / w.abs().amax(0).sqrt()
    plain = Int8(CPU)
    rows = (x[:9]).to(method.activation_dtype)
    expected = plain.apply((rows / s).to(rows.dtype), plain.pack(w * s, bias))
    found = method.apply(rows, packed)
    tolerance = 1e-4 if found.dtype == torch.float32 else 2e-2
    # A number half-way between two levels may fall either way, which moves an output by one product.
    assert (found - expected).abs().median() < tolerance and (found - expected).abs().max() < 0.05
    passed: object = rows
    for stage in method.stages().values():
        passed = stage(passed, packed)
    torch.testing.assert_close(passed, found, rtol=1e-5, atol=1e-5)
    dense = method.dequantize(packed)
    assert (dense - w).abs().max() < 0.05 * w.abs().max()


def test_smoothquant_gains_where_one_input_is_large() -> None:
    def error(alpha: float) -> float:
        method, w, x = smoothed(alpha)
        packed = method.pack_calibrated(w, x)
        return float((method.apply(x.to(method.activation_dtype), packed).float() - x @ w.T).square().mean())

    _, w, x = smoothed()
    plain = Int8(CPU)
    of_int8 = float((plain.apply(x.to(plain.activation_dtype), plain.pack(w)).float() - x @ w.T).square().mean())
    assert error(0.5) < 0.3 * of_int8


def test_alpha_is_a_share() -> None:
    shape = ModelShape(256, 64, 64, 2, 2, 1, 16, 128)
    for alpha, reasons in ((0.5, 0), (1.5, 1), (-0.1, 1)):
        arm = Arm({"precision": {"alpha": alpha}}, shape, 128, "cpu", 1 << 20)
        assert len(SmoothQuant.validate(arm)) == reasons
