"""EAGLE's draft head (Li et al., ICML 2024): one decoder layer that predicts the target's next hidden state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from impls.models.ops import add_rms_norm, rms_norm, rotate, silu_and_mul
from impls.models.rope import inverse_frequencies, rotary_tables
from impls.models.trained_head import TrainedHead
from impls.seams import LayerAttention, LinearMethod, ModelShape, PackedLinear

LAYER = "model.layers.0."


class EagleHead(TrainedHead):
    """Row s reads the embedding of token s and the hidden state of s - 1 (zeros before the first), and gives hidden
    state s; the target's own head rows turn that into logits.

    So what row s stores depends on tokens 0..s and nothing after them, as a target's keys and values do.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        target: ModelShape,
        embed: Callable[[Tensor], Tensor],
        method: LinearMethod,
        device: torch.device,
    ) -> None:
        """tensors: the layer's by name, and what `TrainedHead` reads. embed: the target's."""
        super().__init__(tensors, target, method, device)
        self._embed = embed
        self._inverse_frequencies = inverse_frequencies(target).to(device)

        def packed(*names: str) -> PackedLinear:
            return method.pack(torch.cat([tensors[f"{name}.weight"] for name in names]))

        def norm(name: str) -> Tensor:
            return tensors[f"{name}.weight"].to(device, method.activation_dtype)

        attention, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."
        self._fc, self._q, self._o = packed("fc"), packed(f"{attention}q_proj"), packed(f"{attention}o_proj")
        self._kv = packed(f"{attention}k_proj", f"{attention}v_proj")
        self._gate_up, self._down = packed(f"{mlp}gate_proj", f"{mlp}up_proj"), packed(f"{mlp}down_proj")
        self._embedding_norm, self._hidden_norm = norm("embedding_norm"), norm("hidden_norm")
        self._input_norm, self._norm = norm(f"{LAYER}input_layernorm"), norm("model.norm")
        self._post_attention_norm = norm(f"{LAYER}post_attention_layernorm")

    @property
    def weights_bytes(self) -> int:
        linears = (self._fc, self._q, self._kv, self._o, self._gate_up, self._down, self._lm_head)
        norms = (self._embedding_norm, self._hidden_norm, self._input_norm, self._post_attention_norm, self._norm)
        return sum(each.num_bytes() for each in linears) + sum(each.nbytes for each in norms)

    @property
    def row_parameters(self) -> int:
        linears = (self._fc, self._q, self._kv, self._o, self._gate_up, self._down)
        return sum(each.in_features * each.out_features for each in linears)

    @property
    def observe_parameters(self) -> int:
        return sum(each.in_features * each.out_features for each in (self._fc, self._kv))

    def _input(self, input_ids: Tensor, hidden_before: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream of rows [T] and its norm, [T, hidden] each."""
        eps, dtype = self.shape.rms_norm_eps, self.method.activation_dtype
        embedded = rms_norm(self._embed(input_ids).to(dtype), self._embedding_norm, eps)
        hidden = rms_norm(hidden_before.to(dtype), self._hidden_norm, eps)
        x = self.method.apply(torch.cat((embedded, hidden), 1), self._fc)
        return x, rms_norm(x, self._input_norm, eps)

    def _keys_values(self, h: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        kv = self.method.apply(h, self._kv).view(h.shape[0], 2 * self.shape.num_kv_heads, self.shape.head_dim)
        k, v = kv.chunk(2, dim=1)
        return rotate(k, *tables), v

    def keys_values(self, input_ids: Tensor, hidden_before: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What rows [T] store, [T, num_kv_heads, head_dim] each; nothing else of them is computed."""
        _, h = self._input(input_ids, hidden_before)
        return self._keys_values(h, rotary_tables(self._inverse_frequencies, positions))

    def forward(self, input_ids: Tensor, hidden_before: Tensor, positions: Tensor, attend: LayerAttention) -> Tensor:
        """Predicted final-normed hidden states [T, hidden] of rows [T]; ``attend`` stores their keys and values."""
        shape, method, rows = self.shape, self.method, input_ids.shape[0]
        x, h = self._input(input_ids, hidden_before)
        tables = rotary_tables(self._inverse_frequencies, positions)
        k, v = self._keys_values(h, tables)
        q = rotate(method.apply(h, self._q).view(rows, shape.num_heads, shape.head_dim), *tables)
        attended = attend(0, q, k, v).reshape(rows, shape.num_heads * shape.head_dim)
        h = add_rms_norm(x, method.apply(attended, self._o), self._post_attention_norm, shape.rms_norm_eps)
        h = silu_and_mul(method.apply(h, self._gate_up))
        return add_rms_norm(x, method.apply(h, self._down), self._norm, shape.rms_norm_eps)
