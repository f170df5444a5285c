"""Requests of one batch that are sampled differently, by the processors of transformers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from impls.request import SamplingParams


class RowSampling:
    """A logits processor: each row has its own temperature, top-k and top-p; a greedy row keeps its best token alone.

    What is drawn from the result comes from torch's one generator, in the order of the rows: unlike our own sampler's,
    a token depends on who shares the batch. So sampled tokens of the two cannot be compared one by one.
    """

    def __init__(self, rows: Seq[SamplingParams]) -> None:
        self._rows = [_warpers(sampling) for sampling in rows]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = zip(self._rows, torch.split(input_ids, 1), torch.split(scores, 1), strict=True)
        return torch.cat([warp(ids, row) for warp, ids, row in rows])


def _warpers(sampling: SamplingParams) -> Any:
    transformers: Any = import_module("transformers")
    if sampling.temperature == 0:
        return transformers.LogitsProcessorList([transformers.TopKLogitsWarper(1)])
    warpers = [transformers.TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(sampling.top_p))
    return transformers.LogitsProcessorList(warpers)
