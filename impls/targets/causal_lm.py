"""A model of the transformers library that holds the weights of ours."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from impls.models.rope import inverse_frequencies
from impls.models.tensors import EMBEDDING, HEAD
from impls.seams import ModelShape


def causal_lm(
    shape: ModelShape,
    weights: Mapping[str, Tensor],
    rounding: torch.dtype,
    device: torch.device,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
) -> Any:
    """`LlamaForCausalLM`, or `Qwen3ForCausalLM` where queries and keys are normed, every parameter in ``dtype``.

    weights: FP32, by Hugging Face name, each asked for once and rounded once, to ``rounding``. The rotary
    frequencies are ours, in FP32: whatever scaling a checkpoint declares, both models turn by the same angles. A
    projection that transformers gives a bias and the checkpoint does not (Qwen2's output) gets one of zeros.
    attn_implementation: as the library names it; None: its own choice. ImportError, ValueError if it has none such.
    """
    transformers: Any = import_module("transformers")
    family, options = ("Qwen3", {}) if shape.qk_norm else ("Llama", {"mlp_bias": shape.mlp_bias})
    config = getattr(transformers, f"{family}Config")(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_embeddings,
        attention_bias=shape.attention_bias,
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
        attn_implementation=attn_implementation,
        **options,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    state: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        if name == HEAD and shape.tie_embeddings:
            continue
        given = not name.endswith(".bias") or name in weights  # asking costs the tensor
        source = weights[name] if given else torch.zeros(parameter.shape)
        state[name] = source.to(device, rounding).to(dtype)
    if shape.tie_embeddings:
        state[HEAD] = state[EMBEDDING]
    model.load_state_dict(state, assign=True)
    for buffer in ("inv_freq", "original_inv_freq"):
        setattr(model.model.rotary_emb, buffer, inverse_frequencies(shape).to(device))
    empty = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    if empty:
        raise RuntimeError(f"transformers has tensors that these weights do not fill: {', '.join(empty)}")
    return model.eval().requires_grad_(False)


def kernels_of(model: Any) -> dict[str, str]:
    """As `ForeignTarget.kernels`, with what keys and values are kept in and the library's version."""
    dtype = str(model.dtype).removeprefix("torch.")
    linear, attention = f"torch_{dtype}", str(model.config._attn_implementation)
    library = f"transformers {version('transformers')}"
    return {"linear": linear, "head": linear, "attention": attention, "kv_cache": dtype, "library": library}


def resident_bytes(model: Any) -> int:
    """Bytes of all parameters, shared memory once."""
    found = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in model.parameters()}
    return sum(found.values())
