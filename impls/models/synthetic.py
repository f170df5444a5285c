"""Seeded random weights for a published shape: what a model costs does not depend on what it says."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from impls.models.tensors import EMBEDDING, HEAD, tensor_shapes
from impls.seams import ModelShape

CHUNK = 1 << 22  # elements with one generator each: the result does not depend on the number of threads


class SyntheticWeights(Mapping[str, Tensor]):
    """FP32 tensors made when asked for, a function of (seed, name, shape) alone.

    Linear weights have variance 1 / fan_in, so that activations keep their scale through the layers; the head's is
    4 / hidden_size, which gives logits a standard deviation near 2: a peaked but not one-hot distribution.
    """

    def __init__(self, shape: ModelShape, seed: int) -> None:
        self._shapes, self._seed = tensor_shapes(shape), seed

    def __getitem__(self, name: str) -> Tensor:
        size = self._shapes[name]
        values = self._normal(name, int(np.prod(size))).reshape(size)
        if name.endswith("norm.weight"):
            return values.mul_(0.1).add_(1.0)
        if name.endswith(".bias"):
            return values.mul_(0.1)
        return values.mul_((2.0 if name in (EMBEDDING, HEAD) else 1.0) * size[1] ** -0.5)

    def _normal(self, name: str, count: int) -> Tensor:
        values = np.empty(count, dtype=np.float32)
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")

        def fill(start: int) -> None:
            seeds = np.random.SeedSequence((self._seed, key, start))
            np.random.Generator(np.random.SFC64(seeds)).standard_normal(
                dtype=np.float32, out=values[start : start + CHUNK]
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(fill, range(0, count, CHUNK)))
        return torch.from_numpy(values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def synthetic_fingerprint(shape: ModelShape, seed: int) -> str:
    """Of what decides the weights: none has to be made for it."""
    text = json.dumps([asdict(shape), seed], sort_keys=True)
    return "synthetic:" + hashlib.sha256(text.encode()).hexdigest()[:32]
