"""What surrounds an 8-bit product on a GPU, in Triton: one launch for a row's scale and its rounding, one to rescale.

Through PyTorch's own operators that would be a dozen launches, each as long as the product of a decode step.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (The bodies of kernels are Triton, not Python: pointers and run-time scalars have no Python type.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.precision.w8a8 import LARGEST, SMALLEST_SCALE

MAX_BLOCK = 4096
TO_EVEN = tl.constexpr(1.5 * 2.0**23)  # plus this, an FP32 below 2^22 has no room for a fraction


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # [rows, K]
    values_ptr,  # [rows, K]
    scale_ptr,  # FP32 [rows]
    x_stride,
    K,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    INTEGERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,). Divisions round to nearest. A row with a NaN gets the scale of infinity: it stays not finite."""
    row = tl.program_id(0).to(tl.int64)
    peaks = tl.zeros([BLOCK], tl.float32)
    for first in range(0, K, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.where(x == x, tl.abs(x), float("inf")))
    scale = tl.maximum(tl.math.div_rn(tl.max(peaks, 0), LARGEST), SMALLEST)
    tl.store(scale_ptr + row, scale)
    for first in range(0, K, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        y = tl.minimum(tl.maximum(tl.math.div_rn(x, scale), -LARGEST), LARGEST)
        if INTEGERS:
            y = (y + TO_EVEN) - TO_EVEN
        tl.store(values_ptr + row * K + k, y.to(values_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def rescale_rows_kernel(
    products_ptr,  # [rows, N], of any type
    scale_ptr,  # FP32 [rows]
    weight_scale_ptr,  # FP32 [N]
    bias_ptr,  # FP32 [N], only read if BIAS
    out_ptr,  # [rows, N]
    N,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, blocks of N)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = n < N
    y = tl.load(products_ptr + row * N + n, mask=valid, other=0).to(tl.float32) * tl.load(scale_ptr + row)
    y *= tl.load(weight_scale_ptr + n, mask=valid, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=valid, other=0.0)
    tl.store(out_ptr + row * N + n, y.to(out_ptr.dtype.element_ty), mask=valid)


def quantize_rows(x: Tensor, dtype: torch.dtype, least_rows: int = 0) -> tuple[Tensor, Tensor]:
    """`quantize_int8` or, for E4M3, `round_to_e4m3` by row: values [rows, K] and FP32 scales [rows, 1] of x [rows, K].

    ``least_rows``: of the values, for a product that takes no fewer; what lies behind those of x is not set.
    """
    rows, k = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    # The interpreter's own cast to E4M3 loses carries.
    kept = torch.float32 if triton.knobs.runtime.interpret and dtype.is_floating_point else dtype
    values = torch.empty(max(rows, least_rows), k, dtype=kept, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(MAX_BLOCK, triton.next_power_of_2(k))
    quantize_rows_kernel[(rows,)](
        x,
        values,
        scale,
        x.stride(0),
        k,
        LARGEST=LARGEST[dtype],
        SMALLEST=SMALLEST_SCALE,
        INTEGERS=not dtype.is_floating_point,
        BLOCK=block,
        num_warps=8 if block == MAX_BLOCK else 4,
    )
    return values.to(dtype), scale


def rescale_rows(
    products: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`W8A8.rescale` of the first rows of products [at least rows, N], contiguous, by scales [rows, 1]."""
    rows, n = scale.shape[0], products.shape[1]
    out = torch.empty(rows, n, dtype=dtype, device=products.device)
    block = min(1024, triton.next_power_of_2(n))
    rescale_rows_kernel[(rows, triton.cdiv(n, block))](
        products,
        scale,
        weight_scale,
        weight_scale if bias is None else bias,  # some pointer: it is not read then
        out,
        n,
        BIAS=bias is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out
