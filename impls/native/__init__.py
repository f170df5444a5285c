"""Optional C kernels for CPUs, compiled on first use: what torch lacks on CPUs without BF16 or VNNI instructions."""

from impls.native.attention import MAX_HEAD_DIM, PagedAttention, paged_attention
from impls.native.build import NativeUnavailable, available, why_unavailable
from impls.native.linear import linear_bf16, linear_int8, matmul_int8, pack_panels, quantize_int8, unpack_panels

__all__ = [
    "MAX_HEAD_DIM",
    "NativeUnavailable",
    "PagedAttention",
    "available",
    "linear_bf16",
    "linear_int8",
    "matmul_int8",
    "pack_panels",
    "paged_attention",
    "quantize_int8",
    "unpack_panels",
    "why_unavailable",
]
