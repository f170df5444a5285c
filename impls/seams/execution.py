"""How a step is launched: `Executor`, and the model that it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from impls.seams.arm import Arm, ModelShape
from impls.seams.attention import AttentionBackend, StepBatch
from impls.seams.precision import LinearMethod

# Stores k, v [T, num_kv_heads, head_dim] of a layer, attends with q [T, num_heads, head_dim]: (layer, q, k, v) -> out.
LayerAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class CausalLM(Protocol):
    """What an executor runs: a Llama-family model over the flattened rows of a step."""

    shape: ModelShape
    method: LinearMethod  # through which `forward` sends every linear layer but the head
    elementwise_kernel: str  # what runs between the linear layers, for the record
    packed_by: str | None  # how its layers came by what a text taught them, for the record; None: they learnt nothing

    @property
    def weights_bytes(self) -> int:
        """Bytes of all resident weights."""

    @property
    def head_bytes(self) -> int:
        """Bytes of the LM head, scales included."""

    @property
    def lookup_bytes(self) -> int:
        """Bytes of an embedding table that no matrix product reads; 0 where the head's own memory serves the lookup."""

    @property
    def residual_order(self) -> Tensor | None:
        """int64 [hidden_size]: channel i is channel residual_order[i] of the checkpoint; None: they are its own."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """int64 [T] to [T, hidden] in the method's ``activation_dtype``."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: LayerAttention, num_layers: int | None = None
    ) -> Tensor:
        """Final-normed hidden states [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to FP32 [R, vocab]."""


@dataclass(frozen=True)
class StepLimits:
    """What no step goes beyond. num_draft_tokens: of one sequence, which are verified in one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_draft_tokens: int = 0


class Executor(ABC):
    """How a step is launched. Eager is the norm; compiled and graph variants must match it."""

    model: CausalLM
    attention: AttentionBackend
    overlap: bool = False  # may the engine prepare a step while the one before it runs?
    compiler: str | None = None  # of the operators between the linear layers; None: they run as the model has them
    attention_s: float | None = None  # of the last `execute`: inside `LayerAttention`; None where it cannot be told
    replayed: bool = False  # was the last `execute` the replay of a captured graph?

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        """Reasons why the arm cannot run with this option; empty if it can."""
        return []

    @abstractmethod
    def execute(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """FP32 logits [R, vocab] and final-normed hidden states [T, hidden]."""

    @abstractmethod
    def draft(self, batch: StepBatch, num_layers: int | None = None) -> Tensor:
        """For a proposer: FP32 logits [R, vocab] after the first ``num_layers`` layers (None = all)."""

    def warm_up(self, limits: StepLimits) -> None:
        """Compile or capture every shape that will be run, and run the largest; called before the timed window."""
