"""The 8-bit product of cuBLAS for any number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CUDA_MIN_ROWS = 32  # torch._int_mm on CUDA refuses 16 rows or fewer; 32 is its smallest tile


def padded_int_mm(values: Tensor, weight: Tensor) -> Tensor:
    """INT8 [rows, K] times INT8 [N, K] transposed, INT32 [rows, N]."""
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.impls_int8.padded_int_mm(values, weight)
        return result
    rows = values.shape[0]
    if rows < CUDA_MIN_ROWS:
        values = F.pad(values, (0, 0, 0, CUDA_MIN_ROWS - rows))
    return torch._int_mm(values, weight.t())[:rows]


# What torch.compile traces in its place: a branch on the rows would be a guard, and the other side of it compiled when
# the first step of so many rows comes.
torch.library.define("impls_int8::padded_int_mm", "(Tensor values, Tensor weight) -> Tensor")
torch.library.impl("impls_int8::padded_int_mm", "default", padded_int_mm)
torch.library.register_fake(
    "impls_int8::padded_int_mm",
    lambda values, weight: values.new_empty(values.shape[0], weight.shape[0], dtype=torch.int32),
)
