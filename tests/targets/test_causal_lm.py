"""The model of transformers holds our weights: the same logits, bit for bit the same BF16 parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from target_runs import source_of

from impls.models.llama import LlamaModel
from impls.models.rope import inverse_frequencies
from impls.models.synthetic import SyntheticWeights
from impls.precision.fp32 import Fp32
from impls.seams import ModelShape
from impls.targets.causal_lm import causal_lm, resident_bytes

pytest.importorskip("transformers")

CPU = torch.device("cpu")
BASE = ModelShape(
    vocab_size=199, hidden_size=48, intermediate_size=80, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8,
    max_position=256, rope_theta=500.0,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SHAPES = {
    "untied": BASE,
    "tied": replace(BASE, tie_embeddings=True),
    "wide_heads": replace(BASE, head_dim=16),
    "biases": replace(BASE, attention_bias=True, mlp_bias=True),
    "normed": replace(BASE, qk_norm=True, head_dim=16),
    "linear_rope": replace(BASE, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama3_rope": replace(BASE, rope_scaling=LLAMA3),
    "factors_rope": replace(BASE, rope_scaling={"rope_type": "factors", "factors": [1.0, 1.5, 3.0, 8.0]}),
}


def our_logits(shape: ModelShape, weights: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab], attention written out once more."""
    model = LlamaModel(shape, weights, Fp32(CPU), CPU)
    groups = shape.num_heads // shape.num_kv_heads

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.head_dim**-0.5
        causal = torch.ones(len(ids), len(ids)).tril().bool()
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~causal, float("-inf")).softmax(-1), v)

    with torch.inference_mode():
        positions = torch.arange(len(ids))
        return model.logits(model.forward(torch.tensor(ids), positions, attend))


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_our_logits(name: str) -> None:
    shape = SHAPES[name]
    weights, ids = SyntheticWeights(shape, 3), [7 * n % 199 for n in range(1, 90)]
    model = causal_lm(shape, weights, torch.float32, CPU, torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    ours = our_logits(shape, weights, ids)
    assert float((theirs - ours).abs().max() / ours.abs().max()) < 1e-4


def test_bf16_parameters_are_ours_rounded_once_and_angles_stay_fp32() -> None:
    source = source_of()
    weights = dict(source.weights())
    model = causal_lm(source.shape, weights, torch.bfloat16, CPU, torch.bfloat16)
    parameters = model.state_dict()
    assert {name for name, _ in model.named_parameters()} == set(weights)
    for name, weight in weights.items():
        assert torch.equal(parameters[name], weight.to(torch.bfloat16)), name
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32 and torch.equal(frequencies, inverse_frequencies(source.shape))
    assert model.dtype == torch.bfloat16 and not any(p.requires_grad for p in model.parameters())
    wider = causal_lm(source.shape, weights, torch.bfloat16, CPU, torch.float32)
    assert wider.dtype == torch.float32
    assert all(torch.equal(p, weights[name].to(torch.bfloat16).float()) for name, p in wider.named_parameters())


def test_a_tied_head_is_in_memory_once() -> None:
    tied = causal_lm(SHAPES["tied"], SyntheticWeights(SHAPES["tied"], 0), torch.float32, CPU, torch.float32)
    untied = causal_lm(BASE, SyntheticWeights(BASE, 0), torch.float32, CPU, torch.float32)
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()
    assert resident_bytes(untied) - resident_bytes(tied) == 199 * 48 * 4


def test_weights_that_leave_a_tensor_empty_are_refused() -> None:
    weights = dict(SyntheticWeights(BASE, 0))
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(KeyError, match="up_proj"):
        causal_lm(BASE, weights, torch.float32, CPU, torch.float32)
