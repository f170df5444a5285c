"""The least that a model needs around it: plain FP32 layers and attention over a dictionary."""

from __future__ import annotations

import torch
from torch import Tensor

from impls.models.llama import LlamaModel
from impls.models.source import ModelSource
from impls.seams import LinearMethod, ModelShape, PackedLinear


class PlainLinear(LinearMethod):
    """FP32 weights as they come."""

    name = "plain"
    activation_dtype = torch.float32

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return PackedLinear(weight.shape[1], weight.shape[0], {"weight": weight}, bias)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return torch.nn.functional.linear(x, packed.tensors["weight"], packed.bias)

    def dequantize(self, packed: PackedLinear) -> Tensor:
        return packed.tensors["weight"]


class DictAttention:
    """Causal attention of one sequence; keys and values of earlier calls are kept by layer."""

    def __init__(self, shape: ModelShape) -> None:
        self.groups = shape.num_heads // shape.num_kv_heads
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.cache:
            k, v = torch.cat((self.cache[layer][0], k)), torch.cat((self.cache[layer][1], v))
        self.cache[layer] = (k, v)
        start, end = len(k) - len(q), len(k)
        mask = torch.arange(end)[None] <= torch.arange(start, end)[:, None]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(self.groups, 1)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(self.groups, 1))


def load(source: ModelSource) -> LlamaModel:
    cpu = torch.device("cpu")
    return LlamaModel(source.shape, source.weights(), PlainLinear(cpu), cpu)


@torch.inference_mode()
def stepwise_logits(model: LlamaModel, ids: list[int], *lengths: int) -> Tensor:
    """Logits [len(ids), vocab] of one sequence run in steps of ``lengths`` tokens (a prefill, a chunk, decodes)."""
    attention, rows, start = DictAttention(model.shape), [], 0
    for length in lengths:
        positions = torch.arange(start, start + length)
        rows.append(model.logits(model.forward(torch.tensor(ids)[positions], positions, attention)))
        start += length
    assert start == len(ids)
    return torch.cat(rows)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude."""
    return float((found - expected).abs().max() / expected.abs().max())
