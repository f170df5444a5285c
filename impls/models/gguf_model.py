"""A GGUF file as a model: its metadata as a shape, its tensors dequantised once into the cache."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from impls.models.cache import making
from impls.models.checkpoint import SafetensorsWeights, sampled_fingerprint, shape_from_config
from impls.models.errors import ModelError
from impls.models.gguf_header import GGUFHeader, TensorInfo
from impls.models.tensors import EMBEDDING, FINAL_NORM, HEAD, check_tensors
from impls.seams import ModelShape
from impls.user_cache import cache_dir

FORMAT = 1  # of the converted file: raised when the conversion changes, so that old files are not read
ROPE_FACTORS = "rope_freqs.weight"  # llama3 rope scaling, as a divisor for each frequency
MAX_ROPE_FACTORS = 1 << 12  # half a head's size: they are read before the shape is known
OUTSIDE = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
INSIDE = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CHUNK_ELEMENTS = 1 << 24


def gguf_shape(header: GGUFHeader) -> ModelShape:
    """The shape that a file's metadata declares. ModelError if the architecture is not supported."""
    meta, where = header.metadata, str(header.path)
    arch = meta.get("general.architecture")

    def get(key: str) -> Any:
        return meta.get(f"{arch}.{key}")

    if get("expert_count"):
        raise ModelError(f"{where}: mixture-of-experts models are not supported")
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{where}: tensor token_embd.weight is missing")
    config = {
        "model_type": arch,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length") or get("rope.dimension_count"),
        "max_position_embeddings": get("context_length"),
        "sliding_window": get("attention.sliding_window") or None,
        "rope_theta": get("rope.freq_base") or 10000.0,
        "rope_scaling": _rope_scaling(header, get),
        "rms_norm_eps": _as_written(get("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    shape = shape_from_config(config, where)
    if get("rope.dimension_count") not in (None, shape.head_dim):
        raise ModelError(f"{where}: rope.dimension_count differs from the head's {shape.head_dim}: not supported")
    # Here and not only after the conversion: what cannot be used is refused before minutes are spent on it.
    infos = _weights_of(header)
    check_tensors({name: info.shape for name, info in infos.items()}, shape, where)
    for info in infos.values():
        _check_readable(info, where)
    return shape


def stored_types(header: GGUFHeader) -> dict[str, str]:
    """The block type of each weight, by its Hugging Face name."""
    return {name: info.quantization.name for name, info in _weights_of(header).items()}


def _check_readable(info: TensorInfo, where: str) -> None:
    if info.quantization not in _readable_types():
        read = ", ".join(kind.name for kind in _readable_types())
        raise ModelError(f"{where}: tensor {info.name} is stored as {info.quantization.name}: not read ({read} are)")


@functools.cache
def _readable_types() -> tuple[GGMLQuantizationType, ...]:
    """The types that the `gguf` package can read: it has no list of them."""
    found = []
    for kind, (_, block_bytes) in GGML_QUANT_SIZES.items():
        with suppress(NotImplementedError, KeyError):
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            found.append(kind)
    return tuple(found)


def _weights_of(header: GGUFHeader) -> dict[str, TensorInfo]:
    return {hf: info for name, info in header.tensors.items() if (hf := hf_name(name)) is not None}


def _as_written(value: Any) -> Any:
    """1e-5 and not the FP32 nearest to it, which is what the metadata holds."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _rope_scaling(header: GGUFHeader, get: Any) -> dict[str, Any] | None:
    if (factors := header.tensors.get(ROPE_FACTORS)) is not None:
        if len(factors.shape) != 1 or factors.shape[0] > MAX_ROPE_FACTORS:
            raise ModelError(f"{header.path}: tensor {ROPE_FACTORS} has shape {list(factors.shape)}")
        _check_readable(factors, str(header.path))
        with open(header.path, "rb") as file:
            values = next(_chunks(file, factors, None))
        return {"rope_type": "factors", "factors": [float(value) for value in values]}
    kind = get("rope.scaling.type")
    return None if kind in (None, "none") else {"rope_type": kind, "factor": get("rope.scaling.factor")}


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for what is not a weight. An unknown one is given back as it is."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    if name == ROPE_FACTORS:
        return None
    block, _, rest = name.removeprefix("blk.").partition(".")
    stem, _, kind = rest.rpartition(".")
    return f"model.layers.{block}.{INSIDE[stem]}.{kind}" if name.startswith("blk.") and stem in INSIDE else name


def gguf_weights(header: GGUFHeader, shape: ModelShape) -> Mapping[str, Tensor]:
    """FP32 weights, memory-mapped from the cache; the first call for a file dequantises it there."""
    stat = header.path.stat()
    identity = f"{FORMAT} {stat.st_size} {stat.st_mtime_ns} {sampled_fingerprint([header.path])}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:24]
    target = cache_dir() / "converted" / f"{header.path.stem}-{key}.safetensors"
    if not target.exists():
        with making(target) as partial:
            if partial is not None:
                _convert(header, shape, partial)
    try:
        return SafetensorsWeights(dict.fromkeys(_weights_of(header), target), shape)
    except ModelError as error:
        raise ModelError(f"{error} (a damaged cache file: delete it)") from error


def _convert(header: GGUFHeader, shape: ModelShape, path: Path) -> None:
    """Write the dequantised tensors as one safetensors file, a chunk of rows at a time."""
    infos = _weights_of(header)
    layout: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in infos.items():
        start, end = end, end + 4 * int(np.prod(info.shape))
        layout[name] = {"dtype": "F32", "shape": info.shape, "data_offsets": (start, end)}
    if (free := shutil.disk_usage(path.parent).free) < end:
        raise ModelError(f"{header.path} needs {end} bytes in {path.parent}, {free} are free: set HARNESS_CACHE")
    head = json.dumps(layout).encode()
    head += b" " * (-len(head) % 8)
    with (
        open(header.path, "rb") as source,
        open(path, "wb") as target,
        tqdm(total=end, unit="B", unit_scale=True, desc=f"dequantising {header.path.name}", delay=1) as progress,
    ):
        target.write(struct.pack("<Q", len(head)) + head)
        for name, info in infos.items():
            for values in _chunks(source, info, _row_order(header, shape, name)):
                target.write(values.tobytes())
                progress.update(values.nbytes)


def _row_order(header: GGUFHeader, shape: ModelShape, name: str) -> NDArray[np.int64] | None:
    """Rows in Hugging Face's order: for the `llama` architecture llama.cpp interleaves each head's rotary halves."""
    if header.metadata["general.architecture"] != "llama":
        return None
    for part, heads in (("self_attn.q_proj.", shape.num_heads), ("self_attn.k_proj.", shape.num_kv_heads)):
        if part in name:
            rows = np.arange(heads * shape.head_dim).reshape(heads, shape.head_dim // 2, 2)
            return rows.swapaxes(1, 2).reshape(-1)
    return None


def _chunks(file: BinaryIO, info: TensorInfo, order: NDArray[np.int64] | None) -> Iterator[NDArray[np.float32]]:
    """A tensor's FP32 rows in order, some at a time."""
    vector = len(info.shape) == 1
    columns = info.shape[-1]
    num_rows = 1 if vector else int(np.prod(info.shape[:-1]))
    packed = np.memmap(file, np.uint8, "r", info.offset, (num_rows, info.num_bytes // num_rows))
    if order is not None and vector:
        yield _dequantized(packed, info)[0][order]
        return
    step = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step) if order is None else order[start : start + step]
        values = _dequantized(packed[rows], info)
        yield values[0] if vector else values


def _dequantized(rows: NDArray[np.uint8], info: TensorInfo) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(np.ascontiguousarray(rows), info.quantization)
    return values
