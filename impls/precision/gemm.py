"""The matrix products under the linear methods: `linear_fp32`, and `Bf16Gemm` over weights kept once in BF16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from impls import native
from impls.precision.cpu_features import has_bf16_instructions, has_onednn
from impls.seams import PackedLinear

SCRATCH_ELEMENTS = 1 << 21  # 8 MiB of FP32: what is widened must still be in the L3 cache when it is multiplied
BF16_KERNELS = ("cublas_bf16", "onednn_bf16", "native_bf16", "onednn_fp32_scratch")
FP32_ACTIVATIONS = ("native_bf16", "onednn_fp32_scratch")


def linear_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, K] times weight [N, K] transposed, all FP32. On a CPU by oneDNN: several times MKL's speed on AMD."""
    if x.device.type == "cpu" and has_onednn() and x.shape[0]:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


class Bf16Gemm:
    """y = x W^T (+ bias), accumulated in FP32, with W resident once, in BF16, in the layout of the kernel in use.

    cublas_bf16          CUDA; x and y BF16
    onednn_bf16          a CPU with BF16 instructions, W reordered once into oneDNN's blocked layout; x and y BF16
    native_bf16          any CPU with a C compiler: `impls.native` widens W in registers; x and y FP32
    onednn_fp32_scratch  any CPU: W is widened, a slice that fits in the cache at a time, and multiplied as FP32

    Any value that BF16 holds exactly, such as an E4M3 or an INT8 number, passes through unrounded.
    """

    def __init__(self, device: torch.device, kernel: str = "auto") -> None:
        """ValueError if ``kernel`` is unknown or cannot run on ``device``."""
        self.device = device
        self.kernel = best_bf16_kernel(device) if kernel == "auto" else kernel
        if why := why_not(self.kernel, device):
            raise ValueError(why)
        self.dtype = torch.float32 if self.kernel in FP32_ACTIVATIONS else torch.bfloat16
        self._scratch = torch.empty(0)

    def pack(self, weight: Tensor) -> Tensor:
        """[N, K] to the kernel's layout, rounded to BF16."""
        weight = weight.to(self.device, torch.bfloat16).contiguous()
        if self.kernel == "onednn_bf16":
            reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            return reordered
        return native.pack_panels(weight) if self.kernel == "native_bf16" else weight

    def unpack(self, weight: Tensor, packed: PackedLinear) -> Tensor:
        """The inverse of `pack`: FP32 [N, K], exactly what is multiplied."""
        if self.kernel == "native_bf16":
            weight = native.unpack_panels(weight, packed.out_features, packed.in_features)
        return (weight.to_dense() if self.kernel == "onednn_bf16" else weight).float()

    def rows(self, packed: PackedLinear, ids: Tensor) -> Tensor | None:
        """Rows ``ids`` (int64 [T]) of W in ``dtype``, [T, K]; None in oneDNN's layout, which cannot be indexed."""
        weight = packed.tensors["weight"]
        if self.kernel == "onednn_bf16":
            return None
        if self.kernel == "native_bf16":
            return native.rows_bf16(weight, ids, packed.out_features, packed.in_features)
        return F.embedding(ids, weight).to(self.dtype)

    def matmul(self, x: Tensor, packed: PackedLinear, with_bias: bool = True) -> Tensor:
        """x [rows, K] in ``dtype`` to [rows, N] in ``dtype``; reads ``packed.tensors["weight"]`` and the bias."""
        weight, bias = packed.tensors["weight"], packed.bias if with_bias else None
        if not x.shape[0]:
            return x.new_empty(0, packed.out_features)
        if self.kernel == "onednn_bf16":
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            return out
        if self.kernel == "native_bf16":
            return native.linear_bf16(x.contiguous(), weight, packed.out_features, bias)
        if self.kernel == "cublas_bf16":
            return F.linear(x, weight, bias)
        return self._widened(x, weight, bias)

    def _widened(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        n, k = weight.shape
        step = max(1, SCRATCH_ELEMENTS // k)
        if self._scratch.numel() < min(step, n) * k:
            self._scratch = torch.empty(min(step, n) * k)
        parts = []
        for start in range(0, n, step):
            rows = weight[start : start + step]
            wide = self._scratch[: rows.numel()].view(rows.shape).copy_(rows)
            parts.append(linear_fp32(x, wide, None if bias is None else bias[start : start + step]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def best_bf16_kernel(device: torch.device) -> str:
    """The fastest that this device has; not every CPU has BF16 instructions."""
    if device.type != "cpu":
        return "cublas_bf16"
    if has_bf16_instructions():
        return "onednn_bf16"
    return "native_bf16" if native.available() else "onednn_fp32_scratch"


def why_not(kernel: str, device: torch.device) -> str | None:
    """Why ``kernel`` cannot run on ``device``; None if it can."""
    if kernel not in BF16_KERNELS:
        return f"kernel={kernel}: must be auto or one of {', '.join(BF16_KERNELS)}"
    if (kernel == "cublas_bf16") != (device.type != "cpu"):
        return f"kernel={kernel}: not a kernel for device {device.type}"
    if kernel == "onednn_bf16" and not (has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return f"kernel={kernel}: oneDNN has no BF16 for this CPU"
    if kernel == "native_bf16" and (why := native.why_unavailable()):
        return f"kernel={kernel}: {why}"
    return None
