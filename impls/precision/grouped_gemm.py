"""The matrix products of grouped weights: x in FP32 or BF16 times W in 8, 4, 3 or 2 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from impls import native
from impls.native.grouped import channels, pack_fields, pack_scales, unpack_fields, unpack_scales
from impls.native.linear import PANEL
from impls.precision.cpu_features import activation_dtype, has_avx512
from impls.precision.gemm import SCRATCH_ELEMENTS, linear_fp32
from impls.precision.grouped import GroupedWeight
from impls.seams import PackedLinear

KERNELS = ("native_grouped", "torch_int4pack", "torch_int8pack", "dequantized")
TORCH_KERNELS = {"torch_int4pack": (4, False), "torch_int8pack": (8, True)}  # bits, a scale for each row


@dataclass
class PackedGroups(PackedLinear):
    """A layer as `GroupedGemm` keeps it; what the numbers mean is said here, for layers of a model may differ."""

    bits: int = 0
    group_size: int = 0
    zero_point: bool = False


class GroupedGemm:
    """y = x W^T (+ bias), accumulated in FP32, of a `GroupedWeight`, with one kernel on one device.

    native_grouped  a CPU with a C compiler: `impls.native` unpacks in registers, from 9 rows on once into the cache;
                    FP32 activations; FP16 scales and offsets
    torch_int4pack  torch's CPU operator of 4 bits; out_features are padded to a multiple of 16
    torch_int8pack  torch's CPU operator of 8 bits, symmetric, a scale for each row of W
    dequantized     any device: the packed weights of native_grouped, made dense again for every product, a slice at a
                    time; the bytes are real, the speed is not what the format could reach
    """

    def __init__(self, device: torch.device, bits: int, by_row: bool = False, kernel: str = "auto") -> None:
        """by_row: a scale for each row of W, symmetric. ValueError if ``kernel`` is unknown or cannot run this here."""
        self.device = device
        self.kernel = best_kernel(device, bits, by_row) if kernel == "auto" else kernel
        if why := why_not(self.kernel, device, bits, by_row):
            raise ValueError(why)
        self.dtype = torch.float32 if self.kernel == "native_grouped" else activation_dtype(device)
        # torch's operators want scales in the activations' type.
        self.scale_dtype = self.dtype if self.kernel in TORCH_KERNELS else torch.float16

    def pack(self, weight: GroupedWeight, bias: Tensor | None = None) -> PackedGroups:
        n, k = weight.values.shape
        if self.kernel == "torch_int4pack":
            tensors = self._int4pack(weight)
        elif self.kernel == "torch_int8pack":
            values = (weight.values.to(torch.int16) - 128).to(torch.int8)
            tensors = {"weight": values, "scale": weight.scale.view(n).to(self.scale_dtype)}
        else:
            tensors = {
                "weight": pack_fields(weight.values, weight.bits, weight.group_size).to(self.device),
                "scale": pack_scales(weight.scale, weight.offset).to(self.device),
            }
        bias = None if bias is None else bias.to(self.device, self.dtype)
        return PackedGroups(k, n, tensors, bias, weight.bits, weight.group_size, weight.zero_point)

    def _int4pack(self, weight: GroupedWeight) -> dict[str, Tensor]:
        """torch computes (value - 8) * scale + zero: the zero is the offset plus 8 scales."""
        n = weight.values.shape[0]
        padding = (0, 0, 0, -n % PANEL)
        values = F.pad(weight.values.to(torch.int32), padding)
        pairs = torch.stack((weight.scale, weight.offset + 8 * weight.scale), -1).transpose(0, 1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
        return {"weight": packed, "scale": F.pad(pairs, padding).to(self.scale_dtype).contiguous()}

    def matmul(self, x: Tensor, packed: PackedGroups) -> Tensor:
        """x [rows, K] in ``dtype`` to [rows, N] in ``dtype``, bias added."""
        n, weight, scale = packed.out_features, packed.tensors["weight"], packed.tensors["scale"]
        if not x.shape[0]:
            return x.new_empty(0, n)
        if self.kernel == "native_grouped":
            return native.linear_grouped(
                x.contiguous(), weight, scale, n, bits=packed.bits, group_size=packed.group_size,
                zero_point=packed.zero_point, bias=packed.bias,
            )  # fmt: skip
        if self.kernel == "dequantized":
            return self._dense_matmul(x, packed)
        if self.kernel == "torch_int4pack":
            y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, packed.group_size, scale)[:, :n]
        else:
            y = torch.ops.aten._weight_int8pack_mm(x, weight, scale)
        return y if packed.bias is None else y + packed.bias

    def _dense_matmul(self, x: Tensor, packed: PackedGroups) -> Tensor:
        step = max(PANEL, SCRATCH_ELEMENTS // packed.in_features // PANEL * PANEL)
        parts = []
        for start in range(0, packed.out_features, step):
            ids = torch.arange(start, min(start + step, packed.out_features), device=self.device)
            bias = None if packed.bias is None else packed.bias[start : start + step]
            dense = self._dense_rows(packed, ids).to(self.dtype)
            parts.append(linear_fp32(x, dense, bias) if self.dtype == torch.float32 else F.linear(x, dense, bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def unpack(self, packed: PackedGroups) -> Tensor:
        """FP32 [N, K]: exactly what is multiplied (up to one rounding of scale * value + offset)."""
        n, k = packed.out_features, packed.in_features
        weight, scale = packed.tensors["weight"], packed.tensors["scale"]
        if self.kernel == "torch_int8pack":
            return weight.float() * scale.float().view(n, 1)
        if self.kernel == "torch_int4pack":
            # The operator itself is asked, as its layout is torch's own affair: the unit matrix picks every column.
            unit = torch.eye(k, dtype=torch.float32)
            dense: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(unit, weight, packed.group_size, scale.float())
            return dense.t()[:n].contiguous()
        return self._dense_rows(packed, torch.arange(n, device=self.device))

    def rows(self, packed: PackedGroups, ids: Tensor) -> Tensor | None:
        """Rows ``ids`` (int64 [T]) of W in ``dtype``, [T, K]; None in torch's int4 layout, which cannot be indexed."""
        if self.kernel == "torch_int4pack":
            return None
        if self.kernel == "torch_int8pack":
            values, scale = packed.tensors["weight"][ids].float(), packed.tensors["scale"][ids].float()
            return (values * scale.view(-1, 1)).to(self.dtype)
        return self._dense_rows(packed, ids).to(self.dtype)

    def _dense_rows(self, packed: PackedGroups, ids: Tensor) -> Tensor:
        words = channels(packed.tensors["weight"], ids)
        scale, offset = unpack_scales(channels(packed.tensors["scale"], ids))
        values = unpack_fields(words, packed.bits, packed.group_size, packed.in_features)
        return GroupedWeight(values, scale, offset, packed.bits, packed.zero_point).dequantize()


def best_kernel(device: torch.device, bits: int, by_row: bool) -> str:
    """torch's own operators where AVX512 makes them fast; elsewhere the C kernel, which needs a compiler alone."""
    if device.type != "cpu":
        return "dequantized"
    fast = next((name for name, fits in TORCH_KERNELS.items() if fits == (bits, by_row)), None)
    if fast and has_avx512():
        return fast
    return "native_grouped" if native.available() else "dequantized"


def why_not(kernel: str, device: torch.device, bits: int, by_row: bool) -> str | None:
    """Why ``kernel`` cannot multiply weights of ``bits`` on ``device``; None if it can."""
    if kernel not in KERNELS:
        return f"kernel={kernel}: must be auto or one of {', '.join(KERNELS)}"
    if kernel != "dequantized" and device.type != "cpu":
        return f"kernel={kernel}: not a kernel for device {device.type}"
    if kernel in TORCH_KERNELS and TORCH_KERNELS[kernel] != (bits, by_row):
        return f"kernel={kernel}: not for {bits} bits with a scale for each {'row' if by_row else 'group'}"
    if kernel == "native_grouped" and (why := native.why_unavailable()):
        return f"kernel={kernel}: {why}"
    return None
