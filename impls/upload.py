"""Small tensors that the host makes for a step, copied to its device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of ``values``, numbers or rows of them. From pageable memory its copy would wait for what is queued."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
