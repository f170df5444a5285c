"""Optional C kernels for CPUs, compiled on first use: what torch lacks on CPUs without BF16 or VNNI instructions."""

from impls.native.attention import MAX_HEAD_DIM, PagedAttention
from impls.native.build import NativeUnavailable, available, why_unavailable
from impls.native.elementwise import add_rms_norm, rms_norm, rotate, silu_and_mul
from impls.native.grouped import linear_grouped, linear_w4a8
from impls.native.kv_write import QuantizedWrite
from impls.native.linear import (
    linear_bf16,
    linear_int8,
    matmul_int8,
    pack_panels,
    quantize_int8,
    rows_bf16,
    unpack_panels,
)

__all__ = [
    "MAX_HEAD_DIM",
    "NativeUnavailable",
    "PagedAttention",
    "QuantizedWrite",
    "add_rms_norm",
    "available",
    "linear_bf16",
    "linear_grouped",
    "linear_int8",
    "linear_w4a8",
    "matmul_int8",
    "pack_panels",
    "quantize_int8",
    "rms_norm",
    "rotate",
    "rows_bf16",
    "silu_and_mul",
    "unpack_panels",
    "why_unavailable",
]
