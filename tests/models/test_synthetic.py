"""Seeded weights: the published shapes, the same whoever asks in whatever order, and logits worth sampling from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from model_testing import load, stepwise_logits

from impls.models import synthetic
from impls.models.errors import ModelError
from impls.models.source import open_model
from impls.models.tensors import tensor_shapes

CONFIGS = Path(__file__).parents[2] / "conf" / "model"


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), **changes}


# What the published checkpoints hold, tied heads counted once.
PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0_6b": 596_049_920,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    sizes = tensor_shapes(open_model(config(name)).shape).values()
    assert sum(int(np.prod(size)) for size in sizes) == PUBLISHED[name]


def test_a_tensor_depends_on_seed_and_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = open_model(config("tiny")).weights(), open_model(config("tiny")).weights()
    expected = {name: first[name] for name in first}
    assert all(torch.equal(second[name], expected[name]) for name in reversed(list(second)))
    assert len({float(tensor.sum()) for tensor in expected.values()}) == len(expected)
    other = open_model(config("tiny", seed=1))
    assert not torch.equal(other.weights()["model.norm.weight"], expected["model.norm.weight"])
    assert other.fingerprint != open_model(config("tiny")).fingerprint
    # Threads fill chunks: a tensor of many chunks is the same however they are scheduled.
    monkeypatch.setattr(synthetic, "CHUNK", 100)
    runs = [open_model(config("tiny")).weights()["lm_head.weight"] for _ in range(2)]
    assert torch.equal(*runs) and abs(float(runs[0].std()) - 2 / 8) < 0.01


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_neither_flat_nor_one_hot(tied: bool) -> None:
    source = open_model(config("tiny", shape={**config("tiny")["shape"], "tie_embeddings": tied}))
    ids = [int(id) for id in np.random.default_rng(0).integers(0, 512, 200)]
    logits = stepwise_logits(load(source), ids, 200)
    assert 1 < float(logits.std()) < 4
    assert 0.02 < float(logits.softmax(-1).max(-1).values.mean()) < 0.6
    assert len(set(logits.argmax(-1).tolist())) > 50


def test_shape_errors_are_one_line() -> None:
    with pytest.raises(ModelError, match=r"model.shape.hiden_size is not known: did you mean hidden_size"):
        open_model(config("tiny", shape={"hiden_size": 3}))
    with pytest.raises(ModelError, match=r"model.shape is incomplete"):
        open_model(config("tiny", shape={"hidden_size": 3}))
    with pytest.raises(ModelError, match=r"must hold the fields of a shape"):
        open_model(config("tiny", shape="llama3_8b"))
