"""The heads as they are trained: FP32 modules over padded batches of whole sequences, unrolled as they will draft.

Names and shapes of the parameters are those of the file that `impls.models.draft_heads` reads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from impls.models.rope import inverse_frequencies, rotary_tables
from impls.seams import ModelShape
from scripts.draft_heads.batches import Batch
from scripts.draft_heads.fast_linear import linear


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `impls.models.ops.rotate`, which has no gradient."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((high, low), -1) * sin


class EagleHead(nn.Module):
    """One decoder layer over fc(norm(embedding of token s), norm(hidden state of s - 1)), which predicts hidden state
    s, and with the target's head token s + 1. Position 0 has no hidden state before it: zeros.
    """

    def __init__(self, shape: ModelShape, norm: Tensor) -> None:
        super().__init__()
        self.shape = shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sizes = {
            "fc": (hidden, 2 * hidden),
            **{"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)},
            **{"self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)},
            "mlp.down_proj": (hidden, inner),
        }
        self.names = {name: name if name == "fc" else f"model.layers.0.{name}" for name in sizes}
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(torch.randn(size) * size[1] ** -0.5) for name, size in sizes.items()}
        )
        for name in ("self_attn/o_proj", "mlp/down_proj"):
            self.weights[name].data.mul_(0.5)
        ones = torch.ones(hidden)
        self.embedding_norm, self.hidden_norm = nn.Parameter(ones.clone()), nn.Parameter(ones.clone())
        self.input_norm, self.post_attention_norm = nn.Parameter(ones.clone()), nn.Parameter(ones.clone())
        self.norm = nn.Parameter(norm.clone())
        self.register_buffer("inverse", inverse_frequencies(shape), persistent=False)

    def tensors(self) -> dict[str, Tensor]:
        """By their names in the file."""
        named = {f"{self.names[key.replace('/', '.')]}.weight": weight for key, weight in self.weights.items()}
        return named | {
            "embedding_norm.weight": self.embedding_norm,
            "hidden_norm.weight": self.hidden_norm,
            "model.layers.0.input_layernorm.weight": self.input_norm,
            "model.layers.0.post_attention_layernorm.weight": self.post_attention_norm,
            "model.norm.weight": self.norm,
        }

    def _linear(self, x: Tensor, *names: str) -> Tensor:
        parts = [self.weights[name.replace(".", "/")] for name in names]
        return linear(x, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream and its norm, of rows [T, hidden] each."""
        eps = self.shape.rms_norm_eps
        parts = rms_norm(embedded, self.embedding_norm, eps), rms_norm(hidden, self.hidden_norm, eps)
        x = self._linear(torch.cat(parts, -1), "fc")
        return x, rms_norm(x, self.input_norm, eps)

    def _keys_values(self, h: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        kv = self._linear(h, "self_attn.k_proj", "self_attn.v_proj").view(len(h), -1, self.shape.head_dim)
        k, v = kv.chunk(2, dim=1)
        return rotate(k, *tables), v

    def forward(self, batch: Batch, num_steps: int) -> list[Tensor]:
        """Predicted hidden states [R, hidden] of every draft step, for the rows of ``batch.targets``.

        Step 0 reads the target's own hidden states. Step j reads, at s, what step j - 1 predicted for s - 1, and
        attends to the target's states up to s - j and to those of earlier steps after them: as drafting does.
        """
        shape, eps = self.shape, self.shape.rms_norm_eps
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        groups = heads // kv_heads
        tables = rotary_tables(self.inverse, batch.positions)
        x, h = self._input(batch.embedded, batch.hidden_before)
        k, v = self._keys_values(h, tables)
        grid, length = batch.padded(k), batch.length  # [B, L, kv_heads, dim]
        keys, values = grid.permute(0, 2, 3, 1), batch.padded(v).transpose(1, 2)
        rows = batch.targets
        own_tables = tables[0][rows], tables[1][rows]
        behind = batch.query_positions  # [B, Q]
        outputs: list[Tensor] = []
        drafted: list[tuple[Tensor, Tensor]] = []  # of each step from 1 on: k, v on the query grid
        x, h = x[rows], h[rows]
        for step in range(num_steps):
            if step:
                x, h = self._input(batch.embedded[rows], batch.shifted(outputs[-1], batch.hidden_before[rows]))
                k, v = self._keys_values(h, own_tables)
                drafted.append((batch.on_grid(k), batch.on_grid(v)))
            q = rotate(self._linear(h, "self_attn.q_proj").view(-1, heads, dim), *own_tables)
            q = batch.on_grid(q).view(*behind.shape, kv_heads, groups, dim).permute(0, 2, 3, 1, 4)  # [B, kv, g, Q, dim]
            sizes = q.shape
            scores = (q.reshape(*sizes[:2], -1, dim) @ keys).view(*sizes[:4], length)
            seen = torch.arange(length) <= (behind - step).unsqueeze(-1)
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            late = []
            for i, (k_i, _) in enumerate(drafted):
                moved = _delayed(k_i, step - 1 - i).permute(0, 2, 1, 3).unsqueeze(2)
                late.append((q * moved).sum(-1, keepdim=True))
            weights = (torch.cat((scores, *late), -1) * dim**-0.5).softmax(-1)
            attended = (weights[..., :length].reshape(*sizes[:2], -1, length) @ values).view(sizes)
            for i, (_, v_i) in enumerate(drafted):
                moved = _delayed(v_i, step - 1 - i).permute(0, 2, 1, 3).unsqueeze(2)
                attended = attended + weights[..., length + i].unsqueeze(-1) * moved
            flat = batch.from_grid(attended.permute(0, 3, 1, 2, 4).reshape(*behind.shape, heads * dim))
            x = x + self._linear(flat, "self_attn.o_proj")
            h = rms_norm(x, self.post_attention_norm, eps)
            gate, up = self._linear(h, "mlp.gate_proj", "mlp.up_proj").chunk(2, -1)
            x = x + self._linear(F.silu(gate) * up, "mlp.down_proj")
            outputs.append(rms_norm(x, self.norm, eps))
        return outputs


def _delayed(grid: Tensor, by: int) -> Tensor:
    """[B, Q, ...] where entry a is that of a - ``by``; what has none is what it is (its rows are not counted)."""
    return grid if by == 0 else torch.cat((grid[:, :by], grid[:, :-by]), 1)


class MedusaHeads(nn.Module):
    """Head j: x + silu(W x + b) of the hidden state of s - 1, whose own token s is known, predicts token s + 1 + j."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_heads, hidden_size))

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "bias": self.bias}

    def forward(self, batch: Batch, num_steps: int) -> list[Tensor]:
        """As `EagleHead.forward`: element j predicts the rows of ``batch.targets``, from states j positions earlier."""
        outputs = []
        hidden = batch.hidden_before[batch.targets]
        for j in range(num_steps):
            x = hidden
            for _ in range(j):
                x = batch.shifted(x, hidden)
            outputs.append(x + F.silu(linear(x, self.weight[j]) + self.bias[j]))
        return outputs
