"""Optional C kernels for CPUs, compiled on first use: what torch lacks on CPUs without BF16 or VNNI instructions."""

from impls.native.build import NativeUnavailable, available, why_unavailable
from impls.native.linear import linear_bf16, pack_panels, unpack_panels

__all__ = ["NativeUnavailable", "available", "linear_bf16", "pack_panels", "unpack_panels", "why_unavailable"]
