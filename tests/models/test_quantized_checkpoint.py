"""GPTQ's and AWQ's safetensors layouts, written here number by number as their own packers do, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_testing import load, stepwise_logits
from safetensors.torch import save_file

from impls.models.errors import ModelError
from impls.models.source import open_model

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
LINEARS = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
}  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(fields: list[list[int]], bits: int) -> torch.Tensor:
    words = [sum(value << (bits * i) for i, value in enumerate(word)) for word in fields]
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32).copy())


def gptq_parts(q: Any, z: Any, bits: int, less: int) -> dict[str, torch.Tensor]:
    """AutoGPTQ: words run down the inputs; zeros along the outputs. The first format keeps them less one: GPTQModel
    takes it from a whole word, so that a zero of 0 borrows from its neighbour."""
    (k, n), each, groups = q.shape, 32 // bits, len(z)
    qweight = [pack_words([q[i : i + each, c].tolist() for i in range(0, k, each)], bits) for c in range(n)]
    qzeros = [pack_words([z[g, c : c + each].tolist() for c in range(0, n, each)], bits) for g in range(groups)]
    ones = int(pack_words([[less] * each], bits))
    return {"qweight": torch.stack(qweight, 1), "qzeros": torch.stack(qzeros) - ones}


def awq_parts(q: Any, z: Any) -> dict[str, torch.Tensor]:
    """AutoAWQ's GEMM version: nibble i of a word is the word's output AWQ_ORDER[i]."""

    def rows(matrix: Any) -> torch.Tensor:
        words = [[[row[c + i] for i in AWQ_ORDER] for c in range(0, len(row), 8)] for row in matrix.tolist()]
        return torch.stack([pack_words(row, 4) for row in words])

    return {"qweight": rows(q), "qzeros": rows(z)}


def checkpoint(
    folder: Path,
    quantization: dict[str, Any],
    group: int = 32,
    act_order: bool = False,
    least_zero: int = 1,
    bias: float | None = None,
) -> dict[str, Any]:
    """Writes one and returns the weights that it stands for. bias: in every linear layer."""
    draw = np.random.default_rng(0)
    kind, bits = quantization["quant_method"], quantization["bits"]
    less = int(kind == "gptq" and quantization.get("checkpoint_format", "gptq") == "gptq")
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, 64).half(), "model.norm.weight": torch.ones(64).half(),
        "model.layers.0.input_layernorm.weight": torch.ones(64).half(),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(64).half(),
    }  # fmt: skip
    expected = {name: tensor.float() for name, tensor in tensors.items()}
    for name, (n, k) in LINEARS.items():
        q = draw.integers(0, 1 << bits, (k, n))
        groups = -(-k // group)
        z = draw.integers(least_zero, 1 << bits, (groups, n))
        scales = torch.from_numpy(draw.uniform(0.01, 0.1, (groups, n))).half()
        owner = draw.permutation(np.arange(k) // group) if act_order else np.arange(k) // group
        parts = awq_parts(q, z) if kind == "awq" else gptq_parts(q, z, bits, less)
        if act_order:
            parts["g_idx"] = torch.from_numpy(owner).int()
        if bias is not None:
            parts["bias"] = torch.full((n,), bias).half()
        for part, tensor in {**parts, "scales": scales}.items():
            tensors[f"model.layers.0.{name}.{part}"] = tensor.contiguous()
        weight = scales.float().numpy()[owner] * (q - z[owner])
        expected[f"model.layers.0.{name}.weight"] = torch.from_numpy(weight.T.astype(np.float32))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    return expected


@pytest.mark.parametrize(
    ("quantization", "act_order"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, True),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, False),
        ({"quant_method": "gptq", "bits": 2, "group_size": 32}, False),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, False),
    ],
    ids=str,
)
def test_a_published_layout_is_read_as_what_it_stands_for(
    tmp_path: Path, quantization: dict[str, Any], act_order: bool
) -> None:
    expected = checkpoint(tmp_path, quantization, act_order=act_order)
    source = open_model({"path": tmp_path})
    weights = source.weights()
    assert sorted(weights) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7)
    assert torch.isfinite(stepwise_logits(load(source), [1, 2, 3], 3)).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_zero_of_0_in_the_first_format_has_borrowed_from_its_neighbour(tmp_path: Path, bits: int) -> None:
    """As asymmetric checkpoints have it: one tenth of GPTQModel's zeros, as its authors say."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": 16, "sym": False}
    expected = checkpoint(tmp_path, config, group=16, least_zero=0)
    weights = open_model({"path": tmp_path}).weights()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_last_group_may_be_short(tmp_path: Path) -> None:
    """64 and 128 inputs in groups of 48, which no g_idx names."""
    expected = checkpoint(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 48}, group=48)
    weights = open_model({"path": tmp_path}).weights()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7)


def test_biases_of_zeros_are_no_biases(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    expected = checkpoint(tmp_path, config, bias=0.0)
    assert sorted(open_model({"path": tmp_path}).weights()) == sorted(expected)
    checkpoint(tmp_path, config, bias=0.5)
    with pytest.raises(ModelError, match=r"_proj\.bias belongs to no model"):
        open_model({"path": tmp_path}).weights()


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    for quantization, message in (
        ({"quant_method": "bitsandbytes", "bits": 4}, "quant_method 'bitsandbytes' is not read (gptq, awq are)"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits is not read (2, 4, 8 are)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq version 'gemv' is not read (gemm is)"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
        with pytest.raises(ModelError) as caught:
            open_model({"path": tmp_path})
        assert message in str(caught.value)


def test_a_part_that_is_missing_or_of_another_size_is_said(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.up_proj"
    save_file({n: t for n, t in tensors.items() if n != f"{key}.qzeros"}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensor {key}.qzeros is missing"):
        open_model({"path": tmp_path}).weights()[f"{key}.weight"]
    narrow = tensors[f"{key}.scales"][:, :64].contiguous()
    save_file({**tensors, f"{key}.scales": narrow}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="do not fit together"):
        open_model({"path": tmp_path}).weights()[f"{key}.weight"]
    short = tensors[f"{key}.qweight"][:4].contiguous()
    save_file({**tensors, f"{key}.qweight": short}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"mlp.up_proj.weight has shape \[128, 32\]"):
        open_model({"path": tmp_path}).weights()
