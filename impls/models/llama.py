"""The Llama-family decoder over the flattened rows of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from impls.models.rope import inverse_frequencies, rotary_tables, rotate
from impls.models.tensors import EMBEDDING, FINAL_NORM, HEAD
from impls.seams import LayerAttention, LinearMethod, ModelShape, PackedLinear


@dataclass
class DecoderLayer:
    """One layer's resident weights. ``qk_norm``: [num_heads + num_kv_heads, head_dim], Qwen3 only."""

    input_norm: Tensor
    qkv: PackedLinear
    qk_norm: Tensor | None
    o: PackedLinear
    post_attention_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class LlamaModel:
    """Llama 2/3, SmolLM, Qwen2/2.5/3, Mistral: pre-norm, rotary GQA attention, SwiGLU. Implements `CausalLM`.

    Every linear layer is packed and computed by ``method``; q, k, v are one layer, gate and up another. The residual
    stream is in ``method.activation_dtype``; norms and rotary embedding compute in FP32. Each FP32 source tensor is
    asked for once and dropped after packing, so that the peak is the packed model and one layer's source.
    """

    def __init__(
        self, shape: ModelShape, weights: Mapping[str, Tensor], method: LinearMethod, device: torch.device
    ) -> None:
        self.shape, self.method, self.device = shape, method, device
        self.head_method = method.head_method()
        self._inverse_frequencies = inverse_frequencies(shape).to(device)
        self._layers = [self._load_layer(weights, f"model.layers.{i}.") for i in range(shape.num_layers)]
        self._norm = self._resident(weights[FINAL_NORM], method.activation_dtype)
        self._head = self.head_method.pack(weights[EMBEDDING if shape.tie_embeddings else HEAD])
        self._embedding = self._load_embedding(weights)

    def _resident(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(self.device, dtype)

    def _load_layer(self, weights: Mapping[str, Tensor], prefix: str) -> DecoderLayer:
        shape, dtype = self.shape, self.method.activation_dtype

        def packed(*names: str) -> PackedLinear:
            parts = [weights[f"{prefix}{name}.weight"] for name in names]
            biases = [weights[f"{prefix}{name}.bias"] for name in names if f"{prefix}{name}.bias" in weights]
            return self.method.pack(_joined(parts), _joined(biases) if biases else None)

        def norm(name: str) -> Tensor:
            return self._resident(weights[f"{prefix}{name}.weight"], dtype)

        qk_norm = None
        if shape.qk_norm:
            q_rows = norm("self_attn.q_norm").expand(shape.num_heads, -1)
            qk_norm = torch.cat((q_rows, norm("self_attn.k_norm").expand(shape.num_kv_heads, -1)))
        return DecoderLayer(
            input_norm=norm("input_layernorm"),
            qkv=packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            qk_norm=qk_norm,
            o=packed("self_attn.o_proj"),
            post_attention_norm=norm("post_attention_layernorm"),
            gate_up=packed("mlp.gate_proj", "mlp.up_proj"),
            down=packed("mlp.down_proj"),
        )

    def _load_embedding(self, weights: Mapping[str, Tensor]) -> Tensor:
        """[vocab, hidden] to look rows up in: the tied head's own memory where that is one plain matrix."""
        shared = _plain_matrix(self._head)
        if self.shape.tie_embeddings and shared is not None:
            return shared
        if shared is not None:
            dtype = shared.dtype
        else:  # an opaque head (reordered, quantised): as wide as it, in the formats that rows can be read from
            per_weight = self._head.num_bytes() / (self._head.in_features * self._head.out_features)
            dtype = torch.float32 if per_weight >= 4 else torch.bfloat16
        return self._resident(weights[EMBEDDING], dtype)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all resident weights, memory that two of them share counted once."""
        tensors = [self._norm, self._embedding, *_tensors(self._head)]
        for layer in self._layers:
            tensors += [layer.input_norm, layer.post_attention_norm]
            tensors += [] if layer.qk_norm is None else [layer.qk_norm]
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                tensors += _tensors(linear)
        distinct = {id(tensor): tensor for tensor in tensors}
        return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: LayerAttention, num_layers: int | None = None
    ) -> Tensor:
        """Final-normed hidden states [T, hidden] in ``activation_dtype`` of T rows, after ``num_layers`` layers (all).

        input_ids, positions: int64 [T]. ``attend`` stores a layer's k and v and returns [T, num_heads, head_dim].
        """
        shape, method, eps = self.shape, self.method, self.shape.rms_norm_eps
        rows, width = input_ids.shape[0], (shape.hidden_size,)
        rotated_heads = shape.num_heads + shape.num_kv_heads
        x = F.embedding(input_ids, self._embedding).to(method.activation_dtype)
        cos, sin = rotary_tables(self._inverse_frequencies, positions)
        for index, layer in enumerate(self._layers[:num_layers]):
            h = F.rms_norm(x, width, layer.input_norm, eps)
            qkv = method.apply(h, layer.qkv).view(rows, rotated_heads + shape.num_kv_heads, shape.head_dim)
            qk, v = qkv[:, :rotated_heads], qkv[:, rotated_heads:]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (shape.head_dim,), None, eps) * layer.qk_norm
            qk = rotate(qk, cos, sin)
            attended = attend(index, qk[:, : shape.num_heads], qk[:, shape.num_heads :], v)
            x += method.apply(attended.reshape(rows, shape.num_heads * shape.head_dim), layer.o)
            h = F.rms_norm(x, width, layer.post_attention_norm, eps)
            gate, up = method.apply(h, layer.gate_up).chunk(2, dim=-1)
            x += method.apply(F.silu(gate).mul_(up), layer.down)
        return F.rms_norm(x, width, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to FP32 [R, vocab]."""
        return self.head_method.apply(hidden.to(self.head_method.activation_dtype), self._head).float()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plain_matrix(packed: PackedLinear) -> Tensor | None:
    """The weight, if it is all that was packed and rows can be read from it."""
    (weight, *rest) = packed.tensors.values()
    plain = weight.layout == torch.strided and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return weight if plain and not rest and weight.shape == (packed.out_features, packed.in_features) else None


def _tensors(packed: PackedLinear) -> list[Tensor]:
    return [*packed.tensors.values(), *([] if packed.bias is None else [packed.bias])]
