"""The permutation changes what a quantiser sees and nothing that the model says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from model_testing import PlainLinear, relative_error, stepwise_logits

from impls.models.llama import LlamaModel
from impls.models.permuted import PermutedWeights
from impls.models.source import open_model
from impls.models.synthetic import SyntheticWeights
from impls.seams import ModelShape

CPU = torch.device("cpu")


def tiny() -> ModelShape:
    return open_model(yaml.safe_load((Path(__file__).parents[2] / "conf/model/tiny.yaml").read_text())).shape


class PermutedLinear(PlainLinear):
    permutation_seed = 3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [{}, {"attention_bias": True, "mlp_bias": True}, {"qk_norm": True}])
def test_logits_are_those_of_the_model_as_it_was(family: dict[str, bool], tied: bool) -> None:
    shape = replace(tiny(), tie_embeddings=tied, **family)
    weights = dict(SyntheticWeights(shape, 0))
    if shape.attention_bias:  # Llama's own kind of model has one there too
        weights["model.layers.0.self_attn.o_proj.bias"] = torch.randn(shape.hidden_size)
    ids = torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = LlamaModel(shape, weights, PlainLinear(CPU), CPU)
    permuted = LlamaModel(shape, weights, PermutedLinear(CPU), CPU)
    exact = stepwise_logits(plain, ids, 30, 9, 1)
    assert relative_error(stepwise_logits(permuted, ids, 30, 9, 1), exact) < 1e-5
    assert plain.residual_order is None and permuted.residual_order is not None
    attend = lambda layer, q, k, v: torch.zeros_like(q)  # noqa: E731
    zero = torch.zeros(1, dtype=torch.int64)
    hidden, moved = (model.forward(zero, zero, attend) for model in (plain, permuted))
    torch.testing.assert_close(moved, hidden[:, permuted.residual_order], rtol=1e-4, atol=1e-5)


def test_every_projection_has_its_inputs_in_another_order() -> None:
    """By groups of neighbours, which is what a quantiser sees."""
    shape = tiny()
    weights = SyntheticWeights(shape, 0)
    permuted = PermutedWeights(weights, shape, 0)
    for name, weight in weights.items():
        if name.endswith("proj.weight") or "embed" in name or "lm_head" in name:
            groups = [set(group.tolist()) for group in weight[0].view(-1, 8)]
            found = [set(group.tolist()) for row in permuted[name] for group in row.view(-1, 8)]
            assert not any(group in found for group in groups), name
            assert torch.equal(permuted[name].flatten().sort()[0], weight.flatten().sort()[0]), name
    other = PermutedWeights(weights, shape, 1)
    assert torch.equal(PermutedWeights(weights, shape, 0).residual_order, permuted.residual_order)
    assert not torch.equal(other.residual_order, permuted.residual_order) and len(permuted) == len(weights)
    assert list(permuted) == list(weights)
    orders = [permuted._orders(f"model.layers.{i}.mlp.up_proj.weight")[0] for i in range(2)]
    assert not torch.equal(orders[0], orders[1]), "two layers share an order"
