"""Keys and values in 8 bits, each token's and KV head's with a scale of its own.

The scale of a vector is known when the vector is: no calibration, nothing written before is ever written anew, and what
a token is kept as depends neither on its neighbours nor on its batch. It costs 2 bytes beside head_dim. A static scale
for a head would cost none, but would have to be learnt from other text, and INT8 has no range to spare for its errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest magnitude that is used of each type
SCALE_DTYPE = torch.bfloat16
SMALLEST_SCALE = 2.0**-100  # of a vector of zeros: its reciprocal is still a number


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Finite x [..., D] of any float type as values [..., D] of ``dtype`` (a key of `LARGEST`) and BF16 scales [...].

    Values are rounded half to even, after a division by the scale as it is kept, so that its own rounding costs nothing
    but the last half step of a vector's largest number.
    """
    largest = LARGEST[dtype]
    x = x.float()
    scales = (x.abs().amax(-1) * (1 / largest)).clamp_min_(SMALLEST_SCALE).to(SCALE_DTYPE)
    scaled = (x * scales.float().reciprocal_().unsqueeze(-1)).clamp_(-largest, largest)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scales
