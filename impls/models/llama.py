"""The Llama-family decoder over the flattened rows of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from impls.models.calibration import CalibratingMethod, Pending, attention_within, flattened
from impls.models.ops import add_rms_norm, elementwise_kernel, rms_norm, rotate, silu_and_mul
from impls.models.packed_cache import CALIBRATED, PackedCache, PackedLayers
from impls.models.permuted import PermutedWeights
from impls.models.rope import inverse_frequencies, rotary_tables
from impls.models.tensors import EMBEDDING, FINAL_NORM, HEAD
from impls.seams import LayerAttention, LinearMethod, ModelShape, PackedLinear

LINEARS = ("qkv", "o", "gate_up", "down")


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

    ``residual_order``: int64 [hidden_size] where ``method`` wants its channels permuted: channel i of the hidden states
    is channel residual_order[i] of the checkpoint; None: they are the checkpoint's.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Mapping[str, Tensor],
        method: LinearMethod,
        device: torch.device,
        calibration: Sequence[Sequence[int]] = (),
        kept: PackedCache | None = None,
    ) -> None:
        """calibration: texts as token ids, for which ``method`` packs the layers; without any it packs them as such.

        kept: where the layers that were packed for these texts stay from one start to the next; None: nowhere.
        """
        self.shape, self.method, self.device = shape, method, device
        self.head_method = method.head_method()
        self.elementwise_kernel = elementwise_kernel(method.activation_dtype, device)
        self.packed_by: str | None = None
        self.residual_order: Tensor | None = None
        if method.permutation_seed is not None:
            weights = PermutedWeights(weights, shape, method.permutation_seed)
            self.residual_order = weights.residual_order.to(device)
        self._inverse_frequencies = inverse_frequencies(shape).to(device)
        prefixes = [f"model.layers.{i}." for i in range(shape.num_layers)]
        self._layers = [self._load_layer(weights, prefix, later=bool(calibration)) for prefix in prefixes]
        self._norm = self._resident(weights[FINAL_NORM], method.activation_dtype)
        self._head = self.head_method.pack(weights[EMBEDDING if shape.tie_embeddings else HEAD])
        self._embedding = self._load_embedding(weights)
        if calibration:
            self._pack_calibrated(calibration, kept)

    def _resident(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(self.device, dtype)

    def _pack_calibrated(self, texts: Sequence[Sequence[int]], kept: PackedCache | None) -> None:
        pack = partial(self._packed_for, texts)
        packed, self.packed_by = kept.layers(pack) if kept else (pack(), CALIBRATED)
        for index, layer in enumerate(self._layers):
            for name in LINEARS:
                setattr(layer, name, packed[f"{index}.{name}"])

    @torch.inference_mode()
    def _packed_for(self, texts: Sequence[Sequence[int]]) -> PackedLayers:
        """Read the texts once; each layer is packed when its inputs are known, which the packed ones before it gave."""
        method, self.method = self.method, cast(LinearMethod, CalibratingMethod(self.method))
        ids, positions = flattened(texts, self.device)
        self.forward(ids, positions, attention_within(texts))
        self.method = method
        layers = enumerate(self._layers)
        return {f"{index}.{name}": getattr(layer, name).packed for index, layer in layers for name in LINEARS}

    def _load_layer(self, weights: Mapping[str, Tensor], prefix: str, later: bool) -> DecoderLayer:
        shape, dtype = self.shape, self.method.activation_dtype

        def packed(*names: str) -> PackedLinear:
            def weight() -> Tensor:
                return _joined([weights[f"{prefix}{name}.weight"] for name in names])

            biases = [weights[f"{prefix}{name}.bias"] for name in names if f"{prefix}{name}.bias" in weights]
            bias = _joined(biases) if biases else None
            return cast(PackedLinear, Pending(weight, bias)) if later else self.method.pack(weight(), bias)

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

    def _load_embedding(self, weights: Mapping[str, Tensor]) -> Tensor | None:
        """[vocab, hidden], as wide as the head; None if the tied head's own memory serves the lookup as well."""
        first_row = torch.zeros(1, dtype=torch.int64, device=self.device)
        if self.shape.tie_embeddings and self.head_method.rows(self._head, first_row) is not None:
            return None
        per_weight = self._head.num_bytes() / (self._head.in_features * self._head.out_features)
        narrow = torch.float16 if self.head_method.activation_dtype == torch.float16 else torch.bfloat16
        return self._resident(weights[EMBEDDING], torch.float32 if per_weight >= 4 else narrow)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T, hidden] in ``activation_dtype``."""
        if self._embedding is not None:
            return F.embedding(input_ids, self._embedding).to(self.method.activation_dtype)
        rows = self.head_method.rows(self._head, input_ids)
        assert rows is not None  # `_load_embedding` asked
        return rows.to(self.method.activation_dtype)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all resident weights."""
        tensors = [self._norm, *_tensors(self._head)]
        tensors += [] if self._embedding is None else [self._embedding]
        for layer in self._layers:
            tensors += [layer.input_norm, layer.post_attention_norm]
            tensors += [] if layer.qk_norm is None else [layer.qk_norm]
            for name in LINEARS:
                tensors += _tensors(getattr(layer, name))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def head_bytes(self) -> int:
        """Bytes of the LM head as it is multiplied, scales included."""
        return self._head.num_bytes()

    @property
    def lookup_bytes(self) -> int:
        """Bytes of an embedding table of its own, of which a step reads a few rows; 0 where the head serves."""
        return 0 if self._embedding is None else self._embedding.numel() * self._embedding.element_size()

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: LayerAttention, num_layers: int | None = None
    ) -> Tensor:
        """Final-normed hidden states [T, hidden] in ``activation_dtype`` of T rows, after ``num_layers`` layers (all).

        input_ids, positions: int64 [T]. ``attend`` stores a layer's k and v and returns [T, num_heads, head_dim].
        """
        shape, method, eps = self.shape, self.method, self.shape.rms_norm_eps
        rows, heads, kv_heads = input_ids.shape[0], shape.num_heads, shape.num_kv_heads
        x = self.embed(input_ids)
        cos, sin = rotary_tables(self._inverse_frequencies, positions)
        layers = self._layers[:num_layers]
        first_norm, *next_norms = [*(layer.input_norm for layer in layers), self._norm]
        h = rms_norm(x, first_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            qkv = method.apply(h, layer.qkv).view(rows, heads + 2 * kv_heads, shape.head_dim)
            qk, v = qkv.split_with_sizes([heads + kv_heads, kv_heads], dim=1)
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (shape.head_dim,), None, eps) * layer.qk_norm
            q, k = rotate(qk, cos, sin).split_with_sizes([heads, kv_heads], dim=1)
            attended = attend(index, q, k, v).reshape(rows, heads * shape.head_dim)
            h = add_rms_norm(x, method.apply(attended, layer.o), layer.post_attention_norm, eps)
            h = silu_and_mul(method.apply(h, layer.gate_up))
            h = add_rms_norm(x, method.apply(h, layer.down), next_norm, eps)
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to FP32 [R, vocab]."""
        return self.head_method.apply(hidden.to(self.head_method.activation_dtype), self._head).float()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _tensors(packed: PackedLinear) -> list[Tensor]:
    return [*packed.tensors.values(), *([] if packed.bias is None else [packed.bias])]
