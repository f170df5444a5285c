"""Rotary position embedding, rotate-half convention, with the scalings that keep one table for all lengths."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from impls.models.errors import ModelError
from impls.seams import ModelShape


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """FP32 [head_dim / 2]: radians a position.

    ``rope_scaling`` types: ``default``; ``linear`` (Chen et al., 2023); ``llama3`` (Llama 3.1's three bands);
    ``factors`` (a divisor for each frequency, how GGUF stores llama3). ModelError for any other type.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / _number(scaling, "factor")
    if kind == "factors":
        factors = torch.tensor(scaling["factors"], dtype=torch.float32)
        if factors.shape != frequencies.shape or not bool((factors > 0).all()):
            raise ModelError(f"rope factors must be {len(frequencies)} positive numbers")
        return frequencies / factors
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise ModelError(
        f"rope scaling {kind!r} is not supported (default, linear, llama3 are): its table depends on the length"
    )


def _number(scaling: Mapping[str, Any], key: str) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise ModelError(f"rope scaling {scaling.get('rope_type')!r} needs a positive number {key!r}, has {value!r}")
    return float(value)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are divided by ``factor``, short ones kept, those between blended."""
    factor, trained = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if high <= low:
        raise ModelError(f"rope scaling 'llama3' needs high_freq_factor > low_freq_factor, has {high} and {low}")
    wavelengths = 2 * math.pi / frequencies
    smooth = ((trained / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def rotary_tables(inverse: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 cos and signed sin, [T, 1, head_dim], so that rotate(x) = x * cos + swap_halves(x) * sin.

    Made from the step's positions, once for all layers: exact for any position, and no table of max_position rows
    (67 MB for Llama 3) is resident.
    """
    angles = positions[:, None].float() * inverse
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
