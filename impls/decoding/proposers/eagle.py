"""A head on the target's hidden states drafts, one token after another (EAGLE: Li et al., ICML 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import cast

import torch
from torch import Tensor

from impls.decoding.proposers.chained import ChainedProposer
from impls.models.draft_heads import find_head, permuted
from impls.models.eagle_head import EagleHead, reduced_head
from impls.models.errors import ModelError
from impls.models.source import open_model
from impls.models.tensors import EMBEDDING, HEAD
from impls.request import Sequence
from impls.seams import Arm, DraftForward, DraftResources, ModelRunner, ModelShape, StepBatch


class EagleProposer(ChainedProposer):
    """Everything that it knows lies in the sequences' own blocks: the head's keys and values, and hidden states.

    Row s of the head reads the hidden state of s - 1, which the target left in the block of s - 1, and stores its keys
    and values for s: a function of tokens 0..s, so whoever shares a block shares them rightly, also at a prefix hit's
    edge; and preemption, swapping, forks and rollback need no care of their own. Drafting writes predicted states
    past the verified ones; `observe` writes the target's over them.

    head: a file of `scripts.draft_heads.train`; None: the one that comes with the project for this model.
    """

    model = "head"

    def __init__(
        self,
        *,
        vocab_size: int,
        shape: ModelShape,
        num_draft_tokens: int = 3,
        head: str | None = None,
        draft_sampling: str = "request",
    ) -> None:
        super().__init__(num_draft_tokens, draft_sampling)
        self._vocab_size, self._path = vocab_size, head

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        reasons = super().validate(arm)
        try:
            find_head("eagle", arm.axes["proposer"].get("head"), open_model(arm.axes["model"]).fingerprint)
        except ModelError as error:
            reasons.append(f"proposer.head: {error}")
        return reasons

    @classmethod
    def kv_bytes_per_token(cls, shape: ModelShape, element_bytes: int) -> int:
        keys_values = 2 * shape.num_kv_heads * shape.head_dim * element_bytes
        return keys_values + shape.hidden_size * max(2, element_bytes)

    def attach(self, resources: DraftResources) -> int:
        weights, target, device = resources.weights, resources.model, resources.device
        tensors = find_head("eagle", self._path, resources.fingerprint).tensors()
        head = weights[EMBEDDING if target.shape.tie_embeddings else HEAD]
        tensors["lm_head.weight"] = reduced_head(head, tensors["token_ids"])
        method = target.method.head_method()
        tensors = permuted(tensors, target.residual_order)
        self.head = self._head = EagleHead(tensors, target.shape, target.embed, method, device)
        shape = self._head.shape
        self._attention = resources.attention(shape)
        self._storage = resources.storage(shape.num_kv_heads, shape.head_dim, None)
        narrow = torch.float32 if resources.kv_dtype == torch.float32 else torch.bfloat16
        self._states = resources.storage(1, shape.hidden_size // 2, narrow)  # half a state as k, half as v
        return self._head.weights_bytes

    def num_seen(self, seq: Sequence) -> int:
        return seq.num_tokens - 1

    def observe(self, batch: StepBatch, hidden_states: Tensor | None) -> None:
        assert hidden_states is not None
        self._keep(hidden_states[: batch.num_rows], batch)
        k, v = self._head.keys_values(batch.input_ids, self._states_before(batch), batch.positions)
        self._storage.write(0, k, v, batch.slot_mapping)

    def _forward(
        self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int], runner: ModelRunner
    ) -> dict[str, Tensor]:
        batch = runner.draft_batch(tokens, starts)
        self._attention.prepare(batch)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._storage.write(layer, k, v, batch.slot_mapping)
            return self._attention.forward(q, self._storage.k(layer), self._storage.v(layer), layer)

        hidden = self._head.forward(batch.input_ids, self._states_before(batch), batch.positions, attend)
        self._keep(hidden, batch)
        gathered = self._attention.gathered_bytes(batch)
        runner.record_draft(DraftForward(self.model, None, batch.query_lens, batch.kv_lens, gathered))
        logits = self._head.logits(hidden[batch.logits_indices], self._vocab_size)
        return dict(zip(tokens, logits, strict=True))

    def _keep(self, hidden: Tensor, batch: StepBatch) -> None:
        low, high = hidden.unsqueeze(1).chunk(2, dim=-1)
        self._states.write(0, low, high, batch.slot_mapping)

    def _states_before(self, batch: StepBatch) -> Tensor:
        """[T, hidden]: of each row the state one position before it, zeros before the first."""
        first, size = batch.query_start[:-1].long(), batch.block_size
        before = (batch.positions[first] - 1).clamp_(min=0)
        blocks = batch.block_table.gather(1, (before // size).unsqueeze(1)).squeeze(1).long()
        slots = batch.slot_mapping.roll(1)
        slots[first] = blocks * size + before % size
        halves = [cast(Tensor, each).flatten(0, 2)[slots] for each in (self._states.k(0), self._states.v(0))]
        return torch.where(batch.positions[:, None] > 0, torch.cat(halves, 1), 0.0)
