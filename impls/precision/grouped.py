"""Weights as small integers with a scale and an offset for each group of neighbouring inputs: what quantisers make."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupedWeight:
    """W [N, K] = scale * value + offset, or scale * (value - offset) where the offset is a ``zero_point``.

    values: uint8 [N, K], under 2^bits. scale, offset: FP32 [N, K / group_size], numbers that the kernel's own type
    holds exactly. A group is ``group_size`` neighbours along K; one of K is the whole row.
    """

    values: Tensor
    scale: Tensor
    offset: Tensor
    bits: int
    zero_point: bool = False

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scale.shape[1]

    def dequantize(self) -> Tensor:
        """FP32 [N, K]."""
        n, k = self.values.shape
        values = self.values.view(n, -1, self.group_size).float()
        scale, offset = self.scale[:, :, None], self.offset[:, :, None]
        return (scale * (values - offset) if self.zero_point else scale * values + offset).reshape(n, k)


def asymmetric_grid(groups: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """FP32 scale and offset, rounded to ``dtype``, of 2^bits levels from least to greatest along the last dimension."""
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / ((1 << bits) - 1)).to(dtype).float()
    return scale, low.to(dtype).float()


def nearest(groups: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor:
    """The level nearest to each number of ``groups`` [..., group], FP32; 0 where a group has no extent or is NaN."""
    levels = (groups - offset[..., None]).div_(scale[..., None]).round_().clamp_(0, (1 << bits) - 1)
    return levels.nan_to_num_(0.0)


def round_to_nearest(weight: Tensor, bits: int, group_size: int, dtype: torch.dtype = torch.float16) -> GroupedWeight:
    """Each number to the nearest of its group's levels, which reach from the group's least to its greatest.

    weight: FP32 [N, K]. Scales and offsets are kept in ``dtype``, and rounded before the weights are. A group of equal
    numbers keeps them (as ``dtype`` holds them); one that contains a NaN becomes NaN. ValueError if ``group_size`` does
    not divide K.
    """
    groups = grouped(weight, group_size)
    scale, offset = asymmetric_grid(groups, bits, dtype)
    values = nearest(groups, scale, offset, bits)
    return GroupedWeight(values.to(torch.uint8).view(weight.shape), scale, offset, bits)


def round_symmetrically(weight: Tensor, group_size: int, dtype: torch.dtype = torch.float16) -> GroupedWeight:
    """Eight bits around a zero that is kept: levels -127..127 times a scale, stored from 1 to 255 with zero point 128.

    As `round_to_nearest` otherwise.
    """
    groups = grouped(weight, group_size)
    scale = (groups.abs().amax(-1) / 127.0).to(dtype).float()
    levels = groups.div(scale[..., None]).round_().nan_to_num_(0.0).clamp_(-127, 127)
    values = levels.add_(128).to(torch.uint8).view(weight.shape)
    return GroupedWeight(values, scale, torch.full_like(scale, 128.0), 8, zero_point=True)


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """[N, K] as [N, K / group_size, group_size]. ValueError if that is no whole number."""
    n, k = weight.shape
    if k % group_size:
        raise ValueError(f"group_size={group_size} does not divide in_features={k}")
    return weight.reshape(n, -1, group_size)
