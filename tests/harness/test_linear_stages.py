"""What is timed of the linear layers: all of them, at the rows asked for, in their method's own stages."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor

from harness import linear_stages
from harness.linear_stages import linear_stage_times, row_counts
from impls.models.llama import LlamaModel
from impls.models.source import open_model
from impls.precision.fp32 import Fp32
from impls.precision.int8 import Int8
from impls.seams import LinearMethod, PackedLinear

CPU = torch.device("cpu")
NUM_LAYERS = 3
SHAPE = {
    **{"vocab_size": 64, "hidden_size": 48, "intermediate_size": 96, "num_layers": NUM_LAYERS, "max_position": 64},
    **{"num_heads": 3, "num_kv_heads": 1, "head_dim": 16},
}


class Timed(Int8):
    """A clock that only this method moves: 1 s to quantise a row, 1 s an input feature to multiply, 10 s to rescale.

    `apply` is fused: 2 s a call, and none of the stages.
    """

    def __init__(self) -> None:
        super().__init__(CPU, kernel="onednn_fp32_scratch")
        self.seconds = 0.0
        self.applied: list[tuple[int, int, int]] = []

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        self.seconds += 2
        self.applied.append((x.shape[0], packed.in_features, packed.out_features))
        return x.new_zeros(x.shape[0], packed.out_features)

    def quantize_activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seconds += x.shape[0]
        return super().quantize_activations(x)

    def matmul(self, values: Tensor, packed: PackedLinear) -> Tensor:
        self.seconds += values.shape[1]
        return super().matmul(values, packed)

    def rescale(self, products: Tensor, scale: Tensor, packed: PackedLinear) -> Tensor:
        self.seconds += 10
        return super().rescale(products, scale, packed)


def llama(method: LinearMethod) -> LlamaModel:
    source = open_model({"source": "synthetic", "shape": SHAPE})
    return LlamaModel(source.shape, source.weights(), method, CPU)


def test_every_projection_is_timed_stage_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Timed()
    model = llama(method)
    monkeypatch.setattr(linear_stages, "time", types.SimpleNamespace(perf_counter=lambda: method.seconds))
    assert [record["rows"] for record in linear_stage_times(model, [1, 5])] == [1]  # seconds enough for who waits
    monkeypatch.setattr(linear_stages, "ENOUGH_S", 1e9)
    found = linear_stage_times(model, [1, 5])
    calls = 4 * NUM_LAYERS  # qkv, o, gate and up, down
    widths = NUM_LAYERS * (48 + 48 + 48 + 96)
    assert found == [
        {"rows": rows, "apply_s": 2 * calls, "quantize_s": rows * calls, "matmul_s": widths, "rescale_s": 10 * calls}
        for rows in (1, 5)
    ]
    sizes = [(48, 80), (48, 48), (48, 192), (96, 48)] * NUM_LAYERS
    assert method.applied[-calls:] == [(5, *size) for size in sizes]
    assert model.method is method


def test_the_better_of_the_passes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 0.0, 9.0, 10.0, 14.0])  # the first two: has it taken too long already?
    monkeypatch.setattr(linear_stages, "time", types.SimpleNamespace(perf_counter=lambda: next(times)))
    (found,) = linear_stage_times(llama(Fp32(CPU)), [2])
    assert found == {"rows": 2, "apply_s": 4.0, "quantize_s": None, "matmul_s": None, "rescale_s": None}


def test_rows_are_those_that_a_decode_step_may_have() -> None:
    assert [row_counts(n) for n in (1, 3, 4, 16, 31, 32, 256)] == [
        *([1], [1], [1, 4], [1, 4, 16], [1, 4, 16], [1, 4, 16, 32], [1, 4, 16, 32])
    ]
