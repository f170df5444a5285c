"""A small Llama-shaped model, a storage and steps for executors. Not a test module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from impls.seams import LayerAttention, LinearMethod, ModelShape, PackedLinear, StepBatch
from impls.step_batch import BatchRow, build_batch

SHAPE = ModelShape(
    vocab_size=61,
    hidden_size=96,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=256,
)


class PlainLinear(LinearMethod):
    name = "plain"
    activation_dtype = torch.float32

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return PackedLinear(weight.shape[1], weight.shape[0], {"weight": weight.to(self.device)}, bias)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return F.linear(x, packed.tensors["weight"], packed.bias)

    def dequantize(self, packed: PackedLinear) -> Tensor:
        return packed.tensors["weight"]


class TinyModel:
    """Embedding, layers of norm, qkv with positions mixed in, attention and a gated MLP, norm, head."""

    def __init__(self, device: torch.device, seed: int = 0, num_layers: int = SHAPE.num_layers) -> None:
        self.shape, self.method = SHAPE, PlainLinear(device)
        draw = torch.Generator().manual_seed(seed)

        def weight(out_features: int, in_features: int) -> Tensor:
            return torch.randn(out_features, in_features, generator=draw) * in_features**-0.5

        rows = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
        width, inner = SHAPE.hidden_size, SHAPE.intermediate_size
        sizes = [(rows, width), (width, width), (2 * inner, width), (width, inner)]
        self.layers = [[self.method.pack(weight(*size)) for size in sizes] for _ in range(num_layers)]
        self.embedding = weight(SHAPE.vocab_size, width).to(device)
        self.head = self.method.pack(weight(SHAPE.vocab_size, width))

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: LayerAttention, num_layers: int | None = None
    ) -> Tensor:
        x = F.embedding(input_ids, self.embedding)
        angle = torch.cos(positions * 0.1)[:, None, None]
        for index, (qkv, o, gate_up, down) in enumerate(self.layers[:num_layers]):
            heads = self.method.apply(F.rms_norm(x, x.shape[-1:]), qkv).view(len(x), -1, SHAPE.head_dim)
            qk, v = heads.split((SHAPE.num_heads + SHAPE.num_kv_heads, SHAPE.num_kv_heads), dim=1)
            q, k = (qk * angle).split((SHAPE.num_heads, SHAPE.num_kv_heads), dim=1)
            x = x + self.method.apply(attend(index, q, k, v).flatten(1), o)
            gate, up = self.method.apply(F.rms_norm(x, x.shape[-1:]), gate_up).chunk(2, dim=-1)
            x = x + self.method.apply(F.silu(gate) * up, down)
        return F.rms_norm(x, x.shape[-1:])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.method.apply(hidden, self.head).float()


class TinyStorage:
    """Unwritten slots hold NaN. Writes need no host sync: slot -1 goes to a row that is not part of the cache."""

    def __init__(self, device: torch.device, num_blocks: int = 24, block_size: int = 16) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.rows = torch.full(
            (2, SHAPE.num_layers, num_blocks * block_size + 1, SHAPE.num_kv_heads, SHAPE.head_dim), torch.nan
        ).to(device)

    def _layer(self, which: int, layer: int) -> Tensor:
        return self.rows[which, layer, :-1].view(self.num_blocks, self.block_size, *self.rows.shape[-2:])

    def k(self, layer: int) -> Tensor:
        return self._layer(0, layer)

    def v(self, layer: int) -> Tensor:
        return self._layer(1, layer)

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        slots = torch.where(slot_mapping < 0, self.rows.shape[2] - 1, slot_mapping)
        self.rows[0, layer, slots] = k
        self.rows[1, layer, slots] = v


def step(lens: list[tuple[int, int]], device: torch.device, blocks_each: int = 4) -> StepBatch:
    """Sequence i's first ``kv_len`` tokens, of which the last ``query_len`` run; it owns blocks i * blocks_each...."""
    rows = []
    for i, (query_len, kv_len) in enumerate(lens):
        tokens = [(11 * i + 7 * position) % SHAPE.vocab_size for position in range(kv_len - query_len, kv_len)]
        table = list(range(i * blocks_each, (i + 1) * blocks_each))[: -(-kv_len // 16)]
        rows.append(BatchRow(str(i), tokens, kv_len - query_len, table, 1, query_len))
    return build_batch(rows, 16, device)
