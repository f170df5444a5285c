"""A head on the target's hidden states drafts, one token after another (EAGLE: Li et al., ICML 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from impls.decoding.proposers import trained_weights
from impls.decoding.proposers.chained import ChainedProposer
from impls.decoding.proposers.draft_sampler import DraftSampler
from impls.decoding.proposers.step_states import StepStates
from impls.models.eagle_head import EagleHead
from impls.models.errors import ModelError
from impls.request import Sequence
from impls.seams import Arm, DraftForward, DraftResources, DraftTokens, ModelRunner, ModelShape, StepBatch

KIND = "eagle"


class EagleProposer(ChainedProposer):
    """Everything that it knows lies in the sequences' own blocks: the head's keys and values, and hidden states.

    Row s of the head reads the hidden state of s - 1, which the target left in the block of s - 1, and stores its keys
    and values for s: a function of tokens 0..s, so whoever shares a block shares them rightly, also at a prefix hit's
    edge; and preemption, swapping, forks and rollback need no care of their own. Drafting stores keys and values
    past the verified ones; `observe` writes over them those that the target's states give.

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
        self._vocab_size, self._path, self._draft_sampling = vocab_size, head, draft_sampling

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        reasons = super().validate(arm)
        try:
            trained_weights.file_of(KIND, arm)
        except ModelError as error:
            reasons.append(f"proposer.head: {error}")
        if arm.axes.get("topology", {}).get("name") == "disaggregated":
            reasons.append(
                "topology=disaggregated hands over the target's keys and values alone: the head, which attends to its "
                "own of the whole prompt, would draft from none (topology=colocated or replicas; proposer=medusa)"
            )
        return reasons

    @classmethod
    def kv_bytes_per_token(cls, shape: ModelShape, element_bytes: int) -> int:
        keys_values = replace(shape, num_layers=1).kv_bytes_per_token(element_bytes)
        return keys_values + shape.hidden_size * max(2, element_bytes)

    @classmethod
    def expected_weights_bytes(cls, arm: Arm) -> int:
        return trained_weights.expected_bytes(KIND, arm)

    def attach(self, resources: DraftResources) -> int:
        target, device = resources.model, resources.device
        tensors = trained_weights.read(KIND, self._path, resources)
        method = target.method.draft_head_method()
        self.head = self._head = EagleHead(tensors, target.shape, target.embed, method, device)
        self.sampler = DraftSampler(self._draft_sampling, self._head.token_ids, self._vocab_size)
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
        hidden = hidden_states[: batch.num_rows]
        self._step = StepStates(batch, hidden)
        before = hidden.roll(1, 0)
        before[batch.query_start[:-1].long()] = self._stored_before(batch).to(hidden.dtype)
        low, high = hidden.unsqueeze(1).chunk(2, dim=-1)
        self._states.write(0, low, high, batch.slot_mapping)
        k, v = self._head.keys_values(batch.input_ids, before, batch.positions)
        self._storage.write(0, k, v, batch.slot_mapping)

    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        known = [seq for seq in sequences if seq in self._step]
        if not known:
            return {}
        self._rows = {seq.seq_id: row for row, seq in enumerate(known)}
        self._before = self._step.behind_last_token(known)
        return super().propose(known, k, runner)

    def _forward(self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int], runner: ModelRunner) -> Tensor:
        """One row a sequence. It reads the target's state at first, then what the call before it predicted."""
        if len(tokens) < len(self._rows):  # some want no more
            self._before = self._before[[self._rows[seq_id] for seq_id in tokens]]
            self._rows = {seq_id: row for row, seq_id in enumerate(tokens)}
        batch = runner.draft_batch(tokens, starts)
        self._attention.prepare(batch)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._storage.write(layer, k, v, batch.slot_mapping)
            return self._attention.forward(q, self._storage.k(layer), self._storage.v(layer), layer)

        self._before = self._head.forward(batch.input_ids, self._before, batch.positions, attend)
        gathered = self._attention.gathered_bytes(batch)
        runner.record_draft(DraftForward(self.model, None, batch.query_lens, batch.kv_lens, gathered))
        return self._head.logits(self._before)

    def _stored_before(self, batch: StepBatch) -> Tensor:
        """[S, hidden]: the state one position before each sequence's first row, zeros before position 0."""
        size = batch.block_size
        positions = batch.positions[batch.query_start[:-1].long()]
        before = (positions - 1).clamp_(min=0)
        blocks = batch.block_table.gather(1, (before // size).unsqueeze(1)).squeeze(1).long()
        slots = blocks * size + before % size
        halves = [cast(Tensor, each).flatten(0, 2)[slots] for each in (self._states.k(0), self._states.v(0))]
        return torch.where(positions[:, None] > 0, torch.cat(halves, 1), 0.0)
