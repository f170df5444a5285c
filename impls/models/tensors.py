"""Which tensors a Llama-family model has, by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping

from impls.models.errors import ModelError
from impls.seams import ModelShape

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the model must have; linear weights are [out_features, in_features]."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, shape.attention_bias),
        "self_attn.k_proj": (kv, hidden, shape.attention_bias),
        "self_attn.v_proj": (kv, hidden, shape.attention_bias),
        "self_attn.o_proj": (hidden, q, False),
        "mlp.gate_proj": (inner, hidden, shape.mlp_bias),
        "mlp.up_proj": (inner, hidden, shape.mlp_bias),
        "mlp.down_proj": (hidden, inner, shape.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not shape.tie_embeddings:
        shapes[HEAD] = (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (out_features, in_features, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (out_features, in_features)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (out_features,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        if shape.qk_norm:
            for norm in ("self_attn.q_norm", "self_attn.k_norm"):
                shapes[f"{prefix}{norm}.weight"] = (shape.head_dim,)
    return shapes


def check_tensors(found: Mapping[str, tuple[int, ...]], shape: ModelShape, where: str) -> None:
    """ModelError unless ``found`` is what the model needs, and holds nothing that the model would leave unused."""
    if shape.num_layers > len(found):  # a declared count decides no loop before the file confirms it
        raise ModelError(f"{where}: {shape.num_layers} layers are declared, there are {len(found)} tensors in all")
    needed = tensor_shapes(shape)
    # Llama puts a bias on the output projection as well where it has attention biases; Qwen2 does not.
    o_bias = {f"model.layers.{i}.self_attn.o_proj.bias": (shape.hidden_size,) for i in range(shape.num_layers)}
    allowed = needed | (o_bias if shape.attention_bias else {})
    for name, expected in allowed.items():
        if name not in found:
            if name in needed:
                raise ModelError(f"{where}: tensor {name} is missing")
        elif found[name] != expected:
            raise ModelError(f"{where}: tensor {name} has shape {list(found[name])}, needs {list(expected)}")
    for name in found:
        if name not in allowed and name != HEAD and not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(f"{where}: tensor {name} belongs to no model that is supported here")
