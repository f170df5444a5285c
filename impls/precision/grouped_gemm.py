"""The matrix products of grouped weights: x in FP32 or BF16 times W in 8, 4, 3 or 2 bits."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from impls import native
from impls.gpu import why_no_bf16, why_no_triton
from impls.native.grouped import channels, pack_fields, pack_scales, unpack_fields, unpack_scales
from impls.native.linear import PANEL
from impls.precision.cpu_features import activation_dtype, has_avx512, has_bf16_instructions
from impls.precision.gemm import SCRATCH_ELEMENTS, linear_fp32
from impls.precision.grouped import GroupedWeight
from impls.seams import PackedLinear

KERNELS = ("native_grouped", "triton_grouped", "torch_int4pack", "torch_int8pack", "dequantized")
TORCH_KERNELS = {"torch_int4pack": (4, False), "torch_int8pack": (8, True)}  # bits, a scale for each row
DEVICES = {
    "native_grouped": ("cpu",),
    "triton_grouped": ("cuda",),
    "torch_int4pack": ("cpu", "cuda"),
    "torch_int8pack": ("cpu",),
}


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
    triton_grouped  CUDA from compute capability 8.0 on: the same words and scales, unpacked in registers
    torch_int4pack  torch's operator of 4 bits, of a CPU or (tinygemm, made for few rows) of CUDA from 8.0 on; BF16
                    activations and scales; out_features are padded to a multiple of 16
    torch_int8pack  torch's CPU operator of 8 bits, symmetric, a BF16 scale for each row of W; BF16 activations
    dequantized     any device: the packed weights of native_grouped, made dense again for every product, a slice at a
                    time; the bytes are real, the speed is not what the format could reach
    """

    def __init__(self, device: torch.device, bits: int, by_row: bool = False, kernel: str = "auto") -> None:
        """by_row: a scale for each row of W. ValueError if ``kernel`` is unknown or cannot run this here."""
        self.device = device
        self.kernel = best_kernel(device, bits, by_row) if kernel == "auto" else kernel
        if why := why_not(self.kernel, device, bits, by_row):
            raise ValueError(why)
        if self.kernel in TORCH_KERNELS:  # in FP32 they are scalar loops on a CPU, 10 times slower and more
            self.dtype = self.scale_dtype = torch.bfloat16
        else:
            self.dtype = torch.float32 if self.kernel == "native_grouped" else activation_dtype(device)
            self.scale_dtype = torch.float16
        self._triton = _triton_grouped() if self.kernel == "triton_grouped" else None

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
        n, k = weight.values.shape
        padding = (0, 0, 0, -n % PANEL)
        values = F.pad(weight.values.to(torch.int32), padding)
        pairs = torch.stack((weight.scale, weight.offset + 8 * weight.scale), -1).transpose(0, 1)
        if self.device.type == "cpu":
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
        else:
            nibbles = (values[:, ::2] << 4 | values[:, 1::2]).to(self.device, torch.uint8)
            inner_k_tiles = next(tiles for tiles in (8, 4, 2) if k % (16 * tiles) == 0)
            packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, inner_k_tiles)
        return {"weight": packed, "scale": F.pad(pairs, padding).to(self.device, self.scale_dtype).contiguous()}

    def _int4pack_mm(self, x: Tensor, packed: PackedGroups, scale: Tensor) -> Tensor:
        on_cpu = self.device.type == "cpu"
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu if on_cpu else torch.ops.aten._weight_int4pack_mm
        y: Tensor = multiply(x.contiguous(), packed.tensors["weight"], packed.group_size, scale)
        return y[:, : packed.out_features]

    def matmul(self, x: Tensor, packed: PackedGroups, x_scale: Tensor | None = None) -> Tensor:
        """x [rows, K] in ``dtype`` to [rows, N] in ``dtype``, bias added.

        x_scale: FP32 [rows], of an x in INT8, which ``triton_grouped`` alone takes, for at most 4 bits.
        """
        n, weight, scale = packed.out_features, packed.tensors["weight"], packed.tensors["scale"]
        if not x.shape[0]:
            return x.new_empty(0, n)
        if self.kernel == "native_grouped":
            return native.linear_grouped(
                x.contiguous(), weight, scale, n, bits=packed.bits, group_size=packed.group_size,
                zero_point=packed.zero_point, bias=packed.bias,
            )  # fmt: skip
        if self._triton is not None:
            numbers = (packed.bits, packed.group_size, packed.zero_point)
            y: Tensor = self._triton.linear_grouped(
                x.contiguous(), weight, scale, n, *numbers, packed.bias, x_scale, self.dtype
            )
            return y
        if self.kernel == "dequantized":
            return self._dense_matmul(x, packed)
        if self.kernel == "torch_int4pack":
            y = self._int4pack_mm(x, packed, scale)
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
            # CUDA's makes the weights in BF16 anyway.
            dtype = torch.float32 if self.device.type == "cpu" else self.dtype
            unit = torch.eye(k, dtype=dtype, device=self.device)
            return self._int4pack_mm(unit, packed, scale.to(dtype)).t().float().contiguous()
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
    """torch's operators want BF16 activations: taken where AVX512 makes them fast, and BF16 instructions all else in a
    step as well. Elsewhere the project's own, where it runs.
    """
    fast = next((name for name, fits in TORCH_KERNELS.items() if fits == (bits, by_row)), None)
    if fast and device.type == "cpu" and has_avx512() and has_bf16_instructions():
        return fast
    return own_kernel(device)


def own_kernel(device: torch.device) -> str:
    """The best one of those that keep scales and offsets in FP16, whatever the bits."""
    own = "native_grouped" if device.type == "cpu" else "triton_grouped"
    return "dequantized" if why_not(own, device, 4, False) else own


def why_not(kernel: str, device: torch.device, bits: int, by_row: bool) -> str | None:
    """Why ``kernel`` cannot multiply weights of ``bits`` on ``device``; None if it can."""
    if kernel not in KERNELS:
        return f"kernel={kernel}: must be auto or one of {', '.join(KERNELS)}"
    if device.type not in DEVICES.get(kernel, (device.type,)):
        return f"kernel={kernel}: not a kernel for device {device.type}"
    if kernel in TORCH_KERNELS and TORCH_KERNELS[kernel] != (bits, by_row):
        return f"kernel={kernel}: not for {bits} bits with a scale for each {'row' if by_row else 'group'}"
    if kernel == "native_grouped" and (why := native.why_unavailable()):
        return f"kernel={kernel}: {why}"
    if kernel == "triton_grouped" and (why := why_no_triton(device)):
        return f"kernel={kernel}: {why}"
    if kernel != "dequantized" and device.type == "cuda" and (why := why_no_bf16(device)):
        return f"kernel={kernel}: {why}"
    return None


def _triton_grouped() -> ModuleType:
    """Imported when it is used: the package exists on few CPU-only machines, and reads its settings then."""
    from impls.precision import triton_grouped

    return triton_grouped
