"""The CPU's matrix instructions, by torch's own queries: kernels are chosen by these, never by a model name."""

from __future__ import annotations

import platform
from functools import cache

import torch


@cache
def has_onednn() -> bool:
    """torch was built with oneDNN, so its prepacked linear operators exist."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(torch._C._has_mkldnn)


def _cpu_reports(*names: str) -> bool:
    return any(bool(getattr(torch.cpu, name, bool)()) for name in names)


@cache
def has_bf16_instructions() -> bool:
    """BF16 multiplies in hardware (AVX512-BF16, AMX, Arm BF16). oneDNN alone is no proof: it emulates on AVX512."""
    if not (has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    return _cpu_reports("_is_avx512_bf16_supported", "_is_amx_tile_supported")


@cache
def has_int8_instructions() -> bool:
    """8-bit dot products in hardware (VNNI, AMX): without them torch._int_mm is a scalar loop."""
    return _cpu_reports("_is_vnni_supported", "_is_avx512_vnni_supported", "_is_amx_tile_supported")


@cache
def has_avx512() -> bool:
    """torch runs its AVX512 kernels here."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def activation_dtype(device: torch.device) -> torch.dtype:
    """Of the hidden states under reduced-precision weights: BF16 where the hardware multiplies it, else FP32.

    A kernel may want another: torch's packed operators take BF16 anywhere, `impls.native` FP32.
    """
    return torch.bfloat16 if device.type != "cpu" or has_bf16_instructions() else torch.float32
