"""Hugging Face directories: what is not usable is refused in one line, before memory is spent on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.arm import option
from impls.models.errors import ModelError
from impls.models.source import open_model
from impls.models.tensors import tensor_shapes
from impls.seams import ModelShape

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
    "eos_token_id": [2, 3],
}  # fmt: skip
SHAPE = ModelShape(11, 8, 12, 1, 2, 1, 4, 64, rms_norm_eps=1e-6, tie_embeddings=True)


def write(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(size, generator=generator).to(dtype) for name, size in tensor_shapes(SHAPE).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_fp32_whatever_the_file_holds(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = write(tmp_path, dtype)
    source = open_model({"path": tmp_path})
    assert (source.shape, source.eos_token_ids, source.max_model_len) == (SHAPE, (2, 3), 64)
    assert source.tokenizer is None and "tokenizer.json" in source.tokenizer_reason
    weights = source.weights()
    assert set(weights) == set(tensors)
    assert all(torch.equal(weights[name], tensor.float()) for name, tensor in tensors.items())


def test_weights_do_not_refer_to_the_file(tmp_path: Path) -> None:
    name = "model.norm.weight"
    expected = write(tmp_path, torch.float32)[name]
    weight = open_model({"path": tmp_path}).weights()[name]
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(weight, expected)


def test_the_fingerprint_follows_the_weights_and_not_the_place(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        tensors = write(tmp_path / folder)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, tmp_path / "c" / "model.safetensors")
    first, same, other = (open_model({"path": tmp_path / folder}).fingerprint for folder in ("a", "b", "c"))
    assert first == same != other


def test_the_size_of_a_checkpoint_is_that_of_its_files_of_weights(tmp_path: Path) -> None:
    write(tmp_path, torch.float16)
    assert open_model({"path": tmp_path}).checkpoint_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert open_model(option("model", "tiny")).checkpoint_bytes is None  # its weights are made


def test_a_sliding_window_limits_the_context_instead_of_being_ignored(tmp_path: Path) -> None:
    write(tmp_path, model_type="mistral", sliding_window=48)
    assert open_model({"path": tmp_path}).max_model_len == 48
    write(tmp_path, model_type="mistral", sliding_window=None)
    assert open_model({"path": tmp_path}).max_model_len == 64


def test_max_model_len_is_at_most_the_models_own(tmp_path: Path) -> None:
    write(tmp_path)
    assert open_model({"path": tmp_path, "max_model_len": 20}).max_model_len == 20
    for wrong in (65, 0, "many"):
        with pytest.raises(ModelError, match=rf"max_model_len={wrong} must be between 1 and the model's own 64"):
            open_model({"path": tmp_path, "max_model_len": wrong})


ROPE = "rope_scaling"
BAD_CONFIGS: dict[str, dict[str, Any]] = {
    "model_type 'gpt2' is not supported": {"model_type": "gpt2"},
    "hidden_size must be a positive integer": {"hidden_size": "8"},
    "num_hidden_layers must be a positive integer": {"num_hidden_layers": 0},
    "layers are declared, there are": {"num_hidden_layers": (1 << 31) - 1},
    "has shape": {"intermediate_size": 1 << 30},
    "evenly": {"num_key_value_heads": 3},
    "is odd": {"head_dim": 5},
    "lm_head.weight is missing": {"tie_word_embeddings": False},
    "q_proj.bias is missing": {"model_type": "qwen2"},
    "q_norm.weight is missing": {"model_type": "qwen3"},
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "quant_method 'bitsandbytes' is not read": {"quantization_config": {"quant_method": "bitsandbytes"}},
    "quantization_config must be an object": {"quantization_config": "gptq"},
    "rope scaling 'yarn' is not supported": {ROPE: {"rope_type": "yarn", "factor": 4.0}},
    "rope scaling 'dynamic' is not supported": {ROPE: {"type": "dynamic", "factor": 4.0}},
    "needs a positive number 'factor'": {ROPE: {"type": "linear", "factor": "x"}},
    "rope_scaling must be an object": {ROPE: [1]},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "end-of-sequence id 11": {"eos_token_id": 11},
}


def one_line(reason: str, folder: Path) -> None:
    with pytest.raises(ModelError) as caught:
        open_model({"path": folder}).weights()
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("reason", BAD_CONFIGS)
def test_a_config_that_cannot_be_run_is_refused(reason: str, tmp_path: Path) -> None:
    write(tmp_path, **BAD_CONFIGS[reason])
    one_line(reason, tmp_path)


def shorten(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def enlarge_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def integers(folder: Path) -> None:
    save_file(
        {name: torch.zeros(size, dtype=torch.int8) for name, size in tensor_shapes(SHAPE).items()},
        folder / "model.safetensors",
    )


def stranger(folder: Path) -> None:
    tensors = write(folder)
    save_file(tensors | {"model.layers.0.mlp.gate_proj.lora_A": torch.zeros(2)}, folder / "model.safetensors")


def outside(folder: Path) -> None:
    index = {"weight_map": dict.fromkeys(tensor_shapes(SHAPE), "../model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def misdirected(folder: Path) -> None:
    index = {"weight_map": dict.fromkeys([*tensor_shapes(SHAPE), "model.extra"], "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BAD_FILES: dict[str, Callable[[Path], object]] = {
    "cannot read": shorten,
    "safetensors: Error while": enlarge_header,
    "is I8, not one of": integers,
    "belongs to no model": stranger,
    "is not a file beside it": outside,
    "model.extra is missing": misdirected,
    "has no config.json": lambda folder: (folder / "config.json").unlink(),
    "config.json: ": lambda folder: (folder / "config.json").write_text("{"),
    "holds no JSON object": lambda folder: (folder / "config.json").write_text("[]"),
    "0 safetensors files": lambda folder: (folder / "model.safetensors").unlink(),
    "has no weight_map": lambda folder: (folder / "model.safetensors.index.json").write_text('{"a": 1}'),
}


@pytest.mark.parametrize("reason", BAD_FILES)
def test_a_directory_that_cannot_be_read_is_refused(reason: str, tmp_path: Path) -> None:
    write(tmp_path)
    BAD_FILES[reason](tmp_path)
    one_line(reason, tmp_path)


def test_a_missing_path_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model.path=.*nowhere does not exist"):
        open_model({"path": tmp_path / "nowhere", "source": "synthetic"})
    with pytest.raises(ModelError, match=r"model.source='ftp' must be one of pypi, path, synthetic"):
        open_model({"source": "ftp"})
