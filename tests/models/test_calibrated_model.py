"""A model that is quantised while it reads: what each layer is packed for, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from model_testing import PlainLinear, relative_error, stepwise_logits
from torch import Tensor

from impls.models.calibration import calibration_texts
from impls.models.llama import LlamaModel
from impls.models.source import ModelSource, open_model
from impls.models.synthetic import SyntheticWeights
from impls.precision.awq import Awq
from impls.precision.gptq import Gptq
from impls.precision.weight_only import Int4, WeightOnly
from impls.seams import LinearMethod, ModelShape, PackedLinear

CPU = torch.device("cpu")
TEXTS = [[1, 2, 3, 4, 5], [7, 8, 9]]


@pytest.fixture(scope="module")
def tiny() -> ModelSource:
    return open_model(yaml.safe_load((Path(__file__).parents[2] / "conf/model/tiny.yaml").read_text()))


class Watching(PlainLinear):
    """Rounds weights to quarters, and keeps what each layer was packed for."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.seen: list[Tensor] = []

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return super().pack((weight * 4).round() / 4, bias)

    def pack_calibrated(self, weight: Tensor, inputs: Tensor, bias: Tensor | None = None) -> PackedLinear:
        self.seen.append(inputs.clone())
        return self.pack(weight, bias)


class Recording(PlainLinear):
    """The packed model's own inputs of each layer."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.seen: list[Tensor] = []

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        self.seen.append(x.clone())
        return super().apply(x, packed)


def test_each_layer_is_packed_for_what_the_packed_layers_before_it_give(tiny: ModelSource) -> None:
    """Texts keep apart from each other, and every projection sees all of their tokens."""
    method = Watching()
    model = LlamaModel(tiny.shape, tiny.weights(), method, CPU, TEXTS)
    assert model.method is method and [len(x) for x in method.seen] == [8] * 4 * tiny.shape.num_layers
    start = 0
    for text in TEXTS:
        model.method = recording = Recording()
        stepwise_logits(model, text, len(text))
        expected = recording.seen[: 4 * tiny.shape.num_layers]
        for found, x in zip(method.seen, expected, strict=True):
            torch.testing.assert_close(found[start : start + len(text)], x, rtol=1e-4, atol=1e-5)
        start += len(text)


def structured(shape: ModelShape) -> dict[str, Tensor]:
    """Random weights whose layers read what a trained model's do: inputs that go together, some much larger."""
    weights, g = dict(SyntheticWeights(shape, 0)), torch.Generator().manual_seed(0)
    embedding = torch.randn(shape.vocab_size, 6, generator=g) @ torch.randn(6, shape.hidden_size, generator=g)
    weights["model.embed_tokens.weight"] = embedding + 0.2 * torch.randn(embedding.shape, generator=g)
    for name in weights:
        if name.endswith("layernorm.weight"):
            weights[name] = torch.rand(shape.hidden_size, generator=g) ** 4 * 4 + 0.1
    return weights


@pytest.mark.parametrize("kind", [Gptq, Awq])
def test_what_was_learnt_from_a_text_serves_another(tiny: ModelSource, kind: type[WeightOnly]) -> None:
    weights, texts = structured(tiny.shape), calibration_texts(None, tiny.shape.vocab_size, 1024)
    ids = torch.randint(0, 500, (120,), generator=torch.Generator().manual_seed(5)).tolist()
    assert not any(ids[:2] == text[i : i + 2] for text in texts for i in range(len(text)))

    def logits(method: LinearMethod, texts: Sequence[Sequence[int]] = ()) -> Tensor:
        return stepwise_logits(LlamaModel(tiny.shape, weights, method, CPU, texts), ids, 120)

    exact = logits(PlainLinear(CPU))
    learnt, nearest = logits(kind(CPU, group_size=32), texts), logits(Int4(CPU, group_size=32))
    error, of_nearest = (float((found - exact).square().mean()) for found in (learnt, nearest))
    assert error < 0.8 * of_nearest and relative_error(nearest, exact) < 0.5


def test_the_head_counts_as_it_is_kept(tiny: ModelSource) -> None:
    shape = replace(tiny.shape, tie_embeddings=True)
    weights, size = SyntheticWeights(shape, 0), shape.vocab_size * shape.hidden_size
    sizes = {}
    for bits in (16, 8, 4):
        model = LlamaModel(shape, weights, Int4(CPU, 32, bits, kernel="dequantized"), CPU)  # type: ignore[arg-type]
        sizes[bits] = model.head_bytes
        assert model.lookup_bytes == 0 or bits == 16, "a second table beside a head that can be read by row"
    assert sizes[16] == 2 * size and size <= sizes[8] <= size + 4 * shape.vocab_size
    assert sizes[4] == size // 2 + size // 32 * 4
