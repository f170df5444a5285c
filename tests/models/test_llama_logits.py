"""Logits against transformers: an implementation that shares no code with ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from model_testing import DictAttention, PlainLinear, load, relative_error, stepwise_logits

from impls.models.llama import LlamaModel
from impls.models.source import ModelSource, open_model
from impls.models.synthetic import SyntheticWeights

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 199, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama_untied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama_biases": transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama3_rope": transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3, head_dim=16),
    "linear_rope": transformers.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "mistral": transformers.MistralConfig(**SMALL, head_dim=12, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
}


def randomize(model: torch.nn.Module) -> None:
    """Norms are made as ones and biases as zeros, with which nothing would notice that they are ignored."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if "norm" in name else 0.15 * noise


def prompt(length: int, vocab_size: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(3).integers(0, vocab_size, length)]


@torch.inference_mode()
def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_matches_transformers_in_every_kind_of_step(family: str, tmp_path: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager").eval()
    randomize(reference)
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1, "not sharded: the index would go untested"
    ids = prompt(100, 199)
    found = stepwise_logits(load(open_model({"path": tmp_path})), ids, 70, 27, 1, 1, 1)
    assert relative_error(found, reference_logits(reference, ids)) < 1e-4


def test_the_real_model_matches_transformers_in_every_kind_of_step(real_model: ModelSource) -> None:
    """That the file was also read rightly shows in what the model says: one wrong permutation and it says nothing."""
    shape, tokenizer = real_model.shape, real_model.tokenizer
    assert tokenizer is not None
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, attn_implementation="eager",
    )  # fmt: skip
    weights = dict(real_model.weights())
    with torch.device("meta"):
        reference = transformers.LlamaForCausalLM(config)
    reference.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)
    text = "The capital of Italy is Rome, the capital of Spain is Madrid, and the capital of France is"
    ids = tokenizer.encode(text)
    cpu = torch.device("cpu")
    found = stepwise_logits(LlamaModel(shape, weights, PlainLinear(cpu), cpu), ids, 10, len(ids) - 12, 1, 1)
    assert relative_error(found, reference_logits(reference.eval(), ids)) < 1e-4
    assert tokenizer.decode([int(found[-1].argmax())]) == " Paris"


@pytest.fixture(scope="module")
def tiny() -> ModelSource:
    return open_model(yaml.safe_load((Path(__file__).parents[2] / "conf/model/tiny.yaml").read_text()))


def test_rows_of_other_sequences_do_not_matter(tiny: ModelSource) -> None:
    """Positions belong to rows, not to the batch: two decodes in one step equal two steps of one."""
    model = load(tiny)
    first, second = prompt(9, 500), prompt(5, 300)
    expected = torch.stack([stepwise_logits(model, ids, len(ids) - 1, 1)[-1] for ids in (first, second)])
    caches = [DictAttention(tiny.shape), DictAttention(tiny.shape)]
    with torch.inference_mode():
        for cache, ids in zip(caches, (first, second), strict=True):
            model.forward(torch.tensor(ids[:-1]), torch.arange(len(ids) - 1), cache)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.cat([c(layer, q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i, c in enumerate(caches)])

        hidden = model.forward(torch.tensor([first[-1], second[-1]]), torch.tensor([8, 4]), attend)
        assert relative_error(model.logits(hidden), expected) < 1e-4


def test_stopping_after_some_layers_is_a_shallower_model(tmp_path: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen3"], attn_implementation="eager").eval()
    randomize(reference)
    reference.save_pretrained(tmp_path)
    model = load(open_model({"path": tmp_path}))
    ids = prompt(20, 199)
    reference.model.layers = reference.model.layers[:2]
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(ids), torch.arange(20), DictAttention(model.shape), num_layers=2)
    assert relative_error(model.logits(hidden), reference_logits(reference, ids)) < 1e-4


class HalfLinear(PlainLinear):
    """BF16 weights and activations, in two forms: one that rows can be read from and one that is opaque."""

    activation_dtype = torch.bfloat16
    opaque = False

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        packed = super().pack(weight.bfloat16(), bias)
        if self.opaque:
            packed.tensors = {"weight": packed.tensors["weight"].view(torch.uint8)}
        return packed

    def apply(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        weight = packed.tensors["weight"].view(torch.bfloat16)
        return torch.nn.functional.linear(x, weight, packed.bias)

    def rows(self, packed: Any, ids: torch.Tensor) -> torch.Tensor | None:
        return None if self.opaque else packed.tensors["weight"][ids]


@pytest.mark.parametrize(("tied", "opaque", "tables"), [(True, False, 1), (True, True, 2), (False, False, 2)])
def test_tied_embeddings_share_the_head_where_rows_can_be_read_from_it(
    tiny: ModelSource, tied: bool, opaque: bool, tables: int
) -> None:
    cpu, shape = torch.device("cpu"), replace(tiny.shape, tie_embeddings=tied)
    method, weights = HalfLinear(cpu), SyntheticWeights(shape, 0)
    method.opaque = opaque
    model = LlamaModel(shape, weights, method, cpu)
    one_table = shape.vocab_size * shape.hidden_size
    layers = sum(weights[name].numel() for name in weights if "embed" not in name and "head" not in name)
    assert model.weights_bytes == 2 * (layers + tables * one_table)
    assert model.lookup_bytes == 2 * (tables - 1) * one_table
    ids = prompt(40, shape.vocab_size)
    exact = stepwise_logits(LlamaModel(shape, weights, PlainLinear(cpu), cpu), ids, 40)
    assert relative_error(stepwise_logits(model, ids, 40), exact) < 0.05, "BF16 rounding cannot explain this"
