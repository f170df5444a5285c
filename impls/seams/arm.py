"""What every contract speaks of: the clock, the model's shape, the arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

KV_SCALE_BYTES = 2  # BF16: what scales the 8-bit keys, or values, of one token and one head


class Clock(Protocol):
    """The only clock that anything in `impls` may read: seconds since the run's start."""

    def now(self) -> float: ...

    def sleep_until(self, deadline_s: float) -> None: ...


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a Llama-family model that decide bytes, FLOPs and tensor shapes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Of all layers. Elements of one byte are scaled: a scale for each head's keys, and one for its values."""
        scale_bytes = KV_SCALE_BYTES if element_bytes == 1 else 0
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * element_bytes + scale_bytes)


@dataclass(frozen=True)
class Arm:
    """What `validate` of an axis option may look at: the whole arm, resolved, before anything is built.

    ``axes`` maps a group name (batching, kv_cache, ...) to its resolved config; ``device`` is "cpu" or "cuda".
    ``stored_types``: by Hugging Face name, in what blocks a GGUF file holds each weight (Q4_1, F32, ...); empty for
    other models.
    """

    axes: Mapping[str, Mapping[str, Any]]
    model: ModelShape
    max_model_len: int
    device: str
    kv_budget_bytes: int
    element_bytes: int = 2
    stored_types: Mapping[str, str] = field(default_factory=dict)
