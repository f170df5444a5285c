"""The Triton kernels around 8-bit products against the operators that they replace. Run as a script by
test_precision_triton_rows.py, which sets the interpreter before Triton is imported. With CUDA they run compiled."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import case_scripts
import torch

from impls.precision import triton_rows
from impls.precision.int8 import Int8
from impls.precision.w8a8 import LARGEST, quantize_int8, round_to_e4m3, symmetric_scale

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def rows_of(rows: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows + k)) * 3
    return x.to(DEVICE, dtype)


def check_int8(x: torch.Tensor) -> None:
    values, scale = triton_rows.quantize_rows(x, torch.int8)
    expected, expected_scale = quantize_int8(x)
    torch.testing.assert_close(scale, expected_scale, rtol=2e-7, atol=0)
    assert values.dtype == torch.int8 and values.shape == x.shape and scale.shape == (len(x), 1)
    apart = (values.int() - expected.int()).abs()
    assert apart.max() <= (0 if INTERPRETED else 1)  # on CUDA torch multiplies by a reciprocal


def int8_rows_of_any_length():
    for k in (1, 33, 576, 5000):  # one block, and two
        check_int8(rows_of(3, k))


def int8_rows_in_bf16():
    check_int8(rows_of(4, 130, torch.bfloat16))


def halves_are_rounded_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], device=DEVICE)
    values, scale = triton_rows.quantize_rows(x, torch.int8)
    assert scale.item() == 1.0 and values.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


def rows_of_a_wider_tensor():
    check_int8(rows_of(3, 96)[:, :40])
    check_int8(rows_of(40, 3).t())


def zero_rows_give_zeros():
    x = rows_of(2, 20)
    x[1] = 0
    check_int8(x)
    assert not triton_rows.quantize_rows(x, torch.int8)[0][1].any()


def fp8_rows():
    x = rows_of(3, 576)
    x[1] *= 1000
    values, scale = triton_rows.quantize_rows(x, torch.float8_e4m3fn)
    expected_scale = symmetric_scale(x, LARGEST[torch.float8_e4m3fn], dim=1)
    torch.testing.assert_close(scale, expected_scale, rtol=2e-7, atol=0)
    assert values.dtype == torch.float8_e4m3fn and values.float().abs().amax(1).tolist() == [448.0] * 3
    torch.testing.assert_close(values.float(), round_to_e4m3(x, scale).float(), rtol=0.13, atol=2**-9)
    assert INTERPRETED is False or torch.equal(values.float(), round_to_e4m3(x, scale).float())


def a_product_gets_as_many_rows_as_it_takes():
    x = rows_of(2, 24)
    values, scale = triton_rows.quantize_rows(x, torch.int8, 32)
    assert values.shape == (32, 24) and scale.shape == (2, 1)
    assert torch.equal(values[:2], triton_rows.quantize_rows(x, torch.int8)[0])


def what_is_not_finite_stays_so():
    for bad in (math.nan, math.inf, -math.inf):
        x = rows_of(3, 40)
        x[1, 7] = bad
        values, scale = triton_rows.quantize_rows(x, torch.int8, 32)
        ones = torch.ones(16, device=DEVICE)
        products = values.float() @ torch.ones(40, 16, device=DEVICE)
        y = triton_rows.rescale_rows(products, scale, ones, None, torch.float32)
        assert y.isfinite().all(1).tolist() == [True, False, True]


def products_are_rescaled():
    draw = torch.Generator().manual_seed(0)
    for rows, n, with_bias in ((1, 5, False), (3, 1500, True), (2, 64, True)):
        products = torch.randint(-(2**20), 2**20, (32, n), generator=draw, dtype=torch.int32).to(DEVICE)
        scale, weight_scale, bias = (torch.rand(size, generator=draw).to(DEVICE) for size in ((rows, 1), n, n))
        given = bias if with_bias else None
        y = triton_rows.rescale_rows(products, scale, weight_scale, given, torch.float32)
        expected = products[:rows].double() * scale.double() * weight_scale.double() + (bias if with_bias else 0.0)
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)
        narrow = triton_rows.rescale_rows(products, scale, weight_scale, given, torch.bfloat16)
        torch.testing.assert_close(narrow.double(), expected, rtol=2**-7, atol=1e-6)


def a_layer_is_what_the_plain_operators_give():
    """`Int8.apply` with the kernels in place, its product by torch on whatever is here."""
    draw = torch.Generator().manual_seed(1)
    x, w, b = (torch.randn(*size, generator=draw) for size in ((5, 64), (48, 64), (48,)))
    plain = Int8(torch.device("cpu"), kernel="onednn_int8")
    packed = plain.pack(w, b)
    x = x.to(plain.activation_dtype)
    expected = plain.apply(x, packed)
    if not INTERPRETED:
        return  # its tensors lie on the CPU: the method of a GPU is that of scripts.gpu_checks
    plain.fused = triton_rows
    torch.testing.assert_close(plain.apply(x, packed), expected, rtol=1e-5, atol=1e-5)
    values, scale = plain.quantize_activations(x)
    torch.testing.assert_close(
        plain.rescale(plain.matmul(values, packed), scale, packed), expected, rtol=1e-5, atol=1e-5
    )


CASES: list[Callable[[], None]] = [
    int8_rows_of_any_length,
    int8_rows_in_bf16,
    halves_are_rounded_to_even,
    rows_of_a_wider_tensor,
    zero_rows_give_zeros,
    fp8_rows,
    a_product_gets_as_many_rows_as_it_takes,
    what_is_not_finite_stays_so,
    products_are_rescaled,
    a_layer_is_what_the_plain_operators_give,
]


if __name__ == "__main__":
    assert INTERPRETED or torch.cuda.is_available()
    case_scripts.run(CASES)
