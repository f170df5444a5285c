"""A Hugging Face directory: config.json to a shape, safetensors to FP32 tensors."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from impls.models.errors import ModelError
from impls.models.rope import inverse_frequencies
from impls.models.tensors import check_tensors
from impls.seams import ModelShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAMPLES, SAMPLE_BYTES = 64, 4096
MAX_TEXT_BYTES = 1 << 26  # config, index or tokenizer: the largest tokenizer.json known (Gemma's) has 33 MB


def read_text(path: Path) -> str:
    """A UTF-8 file of at most MAX_TEXT_BYTES. ModelError if it is longer, cannot be read or is none."""
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise ModelError(f"{path} has more than {MAX_TEXT_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} if there is no such file. ModelError if malformed."""
    if not path.exists():
        return {}
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def shape_from_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a config.json declares. ModelError names the key that is missing, odd or not supported."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{where}: model_type {family!r} is not supported ({', '.join(FAMILIES)} are)")
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported (silu is)")

    def count(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise ModelError(f"{where}: {key} must be a positive integer, is {value!r}")
        return value

    def real(key: str, source: Mapping[str, Any], default: float) -> float:
        value = source.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise ModelError(f"{where}: {key} must be a positive number, is {value!r}")
        return float(value)

    heads, hidden = count("num_attention_heads"), count("hidden_size")
    kv_heads = count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: {heads} heads cannot share {kv_heads} key/value heads evenly")
    head_dim = count("head_dim", max(hidden // heads, 1))
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim {head_dim} is odd, rotary embedding needs halves")
    # transformers 5 keeps both under rope_parameters, earlier ones theta at the top and the rest under rope_scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"{where}: rope_scaling must be an object, is {rope!r}")
    if real("partial_rotary_factor", {**config, **rope}, 1.0) != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor is not supported")
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    scaling["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    shape = ModelShape(
        vocab_size=count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=count("intermediate_size"),
        num_layers=count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=_max_position(config, count("max_position_embeddings"), count),
        rope_theta=real("rope_theta", {**config, **rope}, 10000.0),
        rope_scaling=None if scaling["rope_type"] == "default" else scaling,
        rms_norm_eps=real("rms_norm_eps", config, 1e-6),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", family == "qwen2")),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
    )
    inverse_frequencies(shape)  # refuses a scaling that is not supported now, not after the weights are read
    return shape


def _max_position(config: Mapping[str, Any], trained: int, count: Any) -> int:
    """A sliding window changes nothing up to its own length; longer contexts are not offered."""
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    return min(trained, count("sliding_window")) if windowed else trained


class SafetensorsWeights(Mapping[str, Tensor]):
    """FP32 tensors by name from one or more safetensors files, each read when it is looked up.

    Read and not memory-mapped: packing copies every tensor anyway, faulting pages in takes several times as long as
    reading them, and a mapping would count as resident and tie packed weights to a file that others may change.
    """

    def __init__(self, files: Mapping[str, Path], shape: ModelShape) -> None:
        """``files``: tensor name -> file. ModelError if these are not the tensors that ``shape`` needs."""
        self._places: dict[str, tuple[Path, int, torch.dtype, tuple[int, ...]]] = {}
        for path in sorted(set(files.values())):
            start, layout = _layout(path)
            for name in (name for name, where in files.items() if where == path):
                if name not in layout:
                    raise ModelError(f"{path}: tensor {name} is missing")
                if (kind := layout[name]["dtype"]) not in FLOATS:
                    raise ModelError(f"{path}: tensor {name} is {kind}, not one of {', '.join(FLOATS)}")
                offset, size = start + layout[name]["data_offsets"][0], tuple(layout[name]["shape"])
                self._places[name] = (path, offset, FLOATS[kind], size)
        where = str(next(iter(files.values())).parent if files else "no file")
        check_tensors({name: place[3] for name, place in self._places.items()}, shape, where)

    def __getitem__(self, name: str) -> Tensor:
        path, offset, dtype, size = self._places[name]
        tensor = torch.empty(size, dtype=dtype)
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            raw = tensor.view(-1).view(torch.uint8).numpy().data
            while raw:
                if not (count := file.readinto(raw)):
                    raise ModelError(f"{path} was cut short while it was read: tensor {name}")
                raw = raw[count:]
        return tensor.to(torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _layout(path: Path) -> tuple[int, dict[str, Any]]:
    """Where a file's data starts, and its header: name -> dtype, shape, data_offsets. Checked by safetensors first."""
    with _opened(path), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        layout = json.loads(file.read(length))
    layout.pop("__metadata__", None)  # an index may name it as if it were a tensor
    return 8 + length, layout


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def find_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or the only file of a directory. ModelError if there is neither."""
    index = read_json(folder / "model.safetensors.index.json")
    if index:
        names = index.get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise ModelError(f"{folder}: model.safetensors.index.json has no weight_map")
        if bad := next((file for file in names.values() if Path(file).name != file), None):
            raise ModelError(f"{folder}: model.safetensors.index.json names {bad!r}, which is not a file beside it")
        return {name: folder / file for name, file in names.items()}
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelError(f"{folder} has {len(files)} safetensors files: needs one, or model.safetensors.index.json")
    with _opened(files[0]) as file:
        return dict.fromkeys(file.keys(), files[0])


def sampled_fingerprint(files: list[Path]) -> str:
    """Identifies files by their sizes, their heads and evenly spaced samples: milliseconds, whatever their size."""
    digest = hashlib.sha256()
    for path in files:
        try:
            size = path.stat().st_size
            digest.update(str(size).encode())
            with open(path, "rb") as file:
                for sample in range(SAMPLES):
                    file.seek(max(size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1), os.SEEK_SET)
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return "sampled:" + digest.hexdigest()[:32]
