"""From logits to tokens: `Decoder` and `Proposer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from impls.request import Request, Sequence
from impls.seams.arm import Arm, ModelShape
from impls.seams.attention import AttentionBackend, StepBatch
from impls.seams.execution import CausalLM
from impls.seams.kv_cache import LayerStorage
from impls.seams.target import DraftForward


@dataclass
class DraftTokens:
    """Drafts of one sequence. ``probs``: [k, vocab] FP32, the distribution each was drawn from; None = one-hot."""

    token_ids: list[int]
    probs: Tensor | None = None


class NonFiniteLogitsError(ArithmeticError):
    """The model gave NaN or infinity (or -inf only) where a token was to be chosen. ``seq_ids`` says for whom."""

    def __init__(self, seq_ids: Seq[str]) -> None:
        super().__init__(f"non-finite logits for {', '.join(seq_ids)}")
        self.seq_ids = tuple(seq_ids)


@dataclass(frozen=True)
class DecodeCosts:
    """What decoding takes, measured or modelled: figures that a policy is given, so that it reads no clock.

    step_s: rows (one a sequence and one a draft) -> seconds of a step that prefills nothing, drafting left out.
    draft_s: sequences -> seconds in which the proposer drafts one more token for each of them.
    """

    step_s: Mapping[int, float]
    draft_s: Mapping[int, float]


class Decoder(ABC):
    """From a step's logits to the tokens that it yields, and how many drafts the next step is to verify."""

    uses_proposer: bool = False
    emulated: str | None = None  # which setting stands in for a real decision, None if none does

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        """Reasons why the arm cannot run with this option; empty if it can."""
        return []

    @classmethod
    def inexact(cls, options: Mapping[str, Any]) -> str | None:
        """Why the output, with these options, is not what the target alone would give; None: it is."""
        return None

    @abstractmethod
    def decode(self, sequences: Seq[Sequence], logits: Tensor, drafts: Mapping[str, DraftTokens]) -> list[list[int]]:
        """The new tokens of each sequence: its accepted drafts, then one recovered or bonus token (at least one).

        logits: FP32 [R, vocab]; a sequence owns ``len(draft_token_ids) + 1`` consecutive rows, in the order given; its
        row j is the target's distribution of position ``num_tokens + j``. Tokens past a stop token or ``max_tokens``
        are the engine's to cut.
        """

    def sample(self, requests: Seq[Request], positions: Seq[int], logits: Tensor) -> Tensor:
        """Without drafts, `decode` where the logits are: int64 [R], the token of each row, -1 where its logits are not
        finite. Steps that overlap need it, and only they: a decoder that verifies drafts has no such form.

        positions: of the tokens, in their sequences.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be overlapped")

    def draft_lengths(self, most: Mapping[str, int]) -> Mapping[str, int]:
        """How many drafts each sequence that decodes next gets, at most ``most[id]``; called once a step.

        By what `decode` has returned and by `DecodeCosts` alone. Verdicts that it did not use (behind a rejection) are
        no part of the past: their noise is used again, and a length that depends on it would not be exact.
        """
        return most

    def calibrate(self, costs: DecodeCosts) -> None:
        """What steps cost here. Whatever was seen before was a warm-up."""

    def forget(self, seq_id: str) -> None:
        """The sequence finished or was preempted: drop what is kept for it."""


class ModelRunner(Protocol):
    """How a proposer runs a model over the blocks that its sequences already hold."""

    def draft_forward(
        self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int], *, model: str, num_layers: int | None = None
    ) -> dict[str, Tensor]:
        """Run ``tokens[id]`` at positions ``starts[id]``...; FP32 logits [vocab] of each sequence's last row.

        model: "target" or "draft"; num_layers: stop after so many of its layers, then final norm and head.
        """

    def draft_batch(self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int]) -> StepBatch:
        """The same rows as a batch, for a proposer that runs a head of its own."""

    def record_draft(self, forward: DraftForward) -> None:
        """Such a head has run: for the step's cost."""


class DraftHead(Protocol):
    """What the cost of a head's forward depends on; as `CausalLM` has them.

    row_parameters: weights that a row passes through before its logits; observe_parameters: those that every row of the
    target's own step passes through in `Proposer.observe`.
    """

    shape: ModelShape

    @property
    def row_parameters(self) -> int: ...

    @property
    def observe_parameters(self) -> int: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def head_bytes(self) -> int: ...

    @property
    def lookup_bytes(self) -> int: ...


@dataclass(frozen=True)
class DraftResources:
    """What a head that was trained for the target is built from.

    weights: the target's, FP32 by name; fingerprint: theirs. attention: the arm's backend, for a head's shape.
    storage: (num_kv_heads, head_dim, dtype) of one more layer in the same blocks; dtype None: that of the cache.
    """

    model: CausalLM
    weights: Mapping[str, Tensor]
    fingerprint: str
    attention: Callable[[ModelShape], AttentionBackend]
    storage: Callable[[int, int, torch.dtype | None], LayerStorage]
    kv_dtype: torch.dtype
    device: torch.device


class Proposer(ABC):
    """Drafts tokens. Its K/V is extra layers in the same blocks, so preemption, rollback and the budget cover it."""

    num_draft_tokens: int
    needs_draft_model: bool = False
    head: DraftHead | None = None  # after `attach`, where it has one
    max_lookahead_tokens: int = 0  # positions past num_tokens that `propose` itself writes K/V to

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        """Reasons why the arm cannot run with this option; empty if it can."""
        return []

    @classmethod
    def kv_bytes_per_token(cls, shape: ModelShape, element_bytes: int) -> int:
        """What it keeps for each position in the blocks, beside a draft model's K/V; of a target of that shape."""
        return 0

    @classmethod
    def expected_weights_bytes(cls, arm: Arm) -> int:
        """Of weights that `attach` will load, beside a draft model's: to be known before anything is built."""
        return 0

    def attach(self, resources: DraftResources) -> int:
        """Called once, before the first step: load what was trained for this target; bytes of resident weights."""
        return 0

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        """At most ``k[id]`` drafts for each sequence (fewer, or none, are fine)."""

    def observe(self, batch: StepBatch, hidden_states: Tensor | None) -> None:
        """After every step, prefill included: final-normed hidden states [T, hidden]."""

    def truncate(self, seq_id: str, num_tokens: int) -> None:
        """The sequence was swapped out: of what lies in its blocks, so many positions are sure to come back."""

    def forget(self, seq_id: str) -> None:
        """The sequence finished or was preempted: drop what is kept for it."""
