"""Small GGUF files in every supported type, with the weights that a reader must find in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 4, 2, 64, 40
ALPHABET = sorted(ByteLevel.alphabet())
LINEARS = {
    "attn_q": ("self_attn.q_proj", HEADS * HEAD_DIM),
    "attn_k": ("self_attn.k_proj", KV_HEADS * HEAD_DIM),
    "attn_v": ("self_attn.v_proj", KV_HEADS * HEAD_DIM),
    "attn_output": ("self_attn.o_proj", HIDDEN),
    "ffn_gate": ("mlp.gate_proj", 256),
    "ffn_up": ("mlp.up_proj", 256),
    "ffn_down": ("mlp.down_proj", HIDDEN),
}


def permuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to q and k of the `llama` architecture (LlamaModel.permute)."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def packed(generator: np.random.Generator, rows: int, kind: Type) -> NDArray[Any]:
    """Rows of 256 weights as the file holds them: quantised noise, or raw blocks where `gguf` cannot quantise."""
    values = generator.standard_normal((rows, HIDDEN), dtype=np.float32)
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        # Below 0x40: wherever a block keeps FP16 scales, they are finite.
        return generator.integers(0, 0x40, (rows, HIDDEN // block * block_bytes), dtype=np.uint8)


def write_gguf(
    path: Path, kind: Type = Type.F32, arch: str = "llama", others: Mapping[str, Type] | None = None, **extra: Any
) -> dict[str, NDArray[Any]]:
    """Write a one-layer model; returns its FP32 weights by Hugging Face name. ``extra``: more metadata.

    others: by its name in the file (`attn_q`), the type of a linear that is not of ``kind``.
    """
    generator = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {
        "block_count": 1, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": 256,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
    }.items():  # fmt: skip
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", 5000.0)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in extra.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    expected: dict[str, NDArray[Any]] = {}

    def add(name: str, hf: str, rows: NDArray[Any], kind: Type, heads: int | None = None) -> None:
        expected[hf] = gguf.dequantize(rows, kind)
        stored = permuted(rows, heads) if heads and arch == "llama" else rows
        writer.add_tensor(name, stored, raw_dtype=kind)

    add("token_embd.weight", "model.embed_tokens.weight", packed(generator, VOCAB, kind), kind)
    for short, (hf, rows) in LINEARS.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short)
        own = (others or {}).get(short, kind)
        add(f"blk.0.{short}.weight", f"model.layers.0.{hf}.weight", packed(generator, rows, own), own, heads)
        if arch == "qwen2" and short in ("attn_q", "attn_k", "attn_v"):
            bias = generator.standard_normal(rows, dtype=np.float32)
            add(f"blk.0.{short}.bias", f"model.layers.0.{hf}.bias", bias, Type.F32)
    norms = {
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    }
    sizes = dict.fromkeys([*norms, "output_norm"], HIDDEN)
    norms["output_norm"] = "model.norm"
    if arch == "qwen3":
        for part in ("q", "k"):
            norms[f"blk.0.attn_{part}_norm"] = f"model.layers.0.self_attn.{part}_norm"
            sizes[f"blk.0.attn_{part}_norm"] = HEAD_DIM
    for short, hf in norms.items():
        add(f"{short}.weight", f"{hf}.weight", generator.standard_normal(sizes[short], dtype=np.float32), Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def byte_level_vocabulary() -> dict[str, Any]:
    """Metadata of a tokenizer with one token a byte and one merge (more tokens than the tiny embedding has rows)."""
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "gpt-2",
        "tokenizer__ggml__tokens": ["<|end|>", *ALPHABET, "ab"],
        "tokenizer__ggml__token_type": [3] + [1] * (len(ALPHABET) + 1),
        "tokenizer__ggml__merges": ["a b"],
        "tokenizer__ggml__eos_token_id": 0,
    }
