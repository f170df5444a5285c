"""Independent heads on the target's last state draft, each another token ahead (Medusa: Cai et al., ICML 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.decoding.proposers import trained_weights
from impls.decoding.proposers.draft_sampler import DraftSampler
from impls.decoding.proposers.step_states import StepStates
from impls.models.errors import ModelError
from impls.models.medusa_heads import MedusaHeads
from impls.request import Sequence
from impls.seams import Arm, DraftForward, DraftResources, DraftTokens, ModelRunner, ModelShape, Proposer, StepBatch

KIND = "medusa"


class MedusaProposer(Proposer):
    """All drafts of a step in one pass, from the state that the target chose the last token from.

    It keeps nothing for a sequence, and writes nothing to its blocks: that state is of the step that has just run. A
    draft's distribution knows none of the drafts before it; the verifier is exact for any that does not look ahead.

    num_draft_tokens: how many of the file's heads draft. head: a file of `scripts.draft_heads.train`; None: the one
    that comes with the project for this model. draft_sampling: as `DraftSampler`'s.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        shape: ModelShape,
        num_draft_tokens: int = 3,
        head: str | None = None,
        draft_sampling: str = "request",
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._vocab_size, self._path, self._draft_sampling = vocab_size, head, draft_sampling

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        reasons = super().validate(arm) + DraftSampler.reasons(arm)
        try:
            most = trained_weights.file_of(KIND, arm).size("weight")[0]
        except ModelError as error:
            return [*reasons, f"proposer.head: {error}"]
        count = arm.axes["proposer"].get("num_draft_tokens", 0)
        if count > most:
            reasons.append(f"proposer.num_draft_tokens={count}: must be at most {most}, one head a draft")
        return reasons

    @classmethod
    def expected_weights_bytes(cls, arm: Arm) -> int:
        return trained_weights.expected_bytes(KIND, arm)

    def attach(self, resources: DraftResources) -> int:
        target, device = resources.model, resources.device
        tensors = trained_weights.read(KIND, self._path, resources)
        method = target.method.draft_head_method()
        self.head = self._heads = MedusaHeads(tensors, target.shape, method, device, self.num_draft_tokens)
        self._sampler = DraftSampler(self._draft_sampling, self._heads.token_ids, self._vocab_size)
        return self._heads.weights_bytes

    def observe(self, batch: StepBatch, hidden_states: Tensor | None) -> None:
        assert hidden_states is not None
        self._step = StepStates(batch, hidden_states)

    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        known = [seq for seq in sequences if seq in self._step]
        counts = [min(k.get(seq.seq_id, 0), self.num_draft_tokens) for seq in known]
        owners = [seq for seq, count in zip(known, counts, strict=True) for _ in range(count)]
        if not owners:
            return {}
        steps = [step for count in counts for step in range(count)]
        rows = [i * self.num_draft_tokens + step for i, count in enumerate(counts) for step in range(count)]
        states = self._heads.forward(self._step.behind_last_token(known)).flatten(0, 1)
        if len(rows) < states.shape[0]:
            states = states[rows]
        runner.record_draft(DraftForward("head", None, [1] * len(rows), [0] * len(rows)))
        chosen, probs = self._sampler.choose(owners, steps, self._heads.logits(states))
        drafts: dict[str, DraftTokens] = {}
        first = 0
        for seq, count in zip(known, counts, strict=True):
            own = chosen[first : first + count]
            own = own[: own.index(-1)] if -1 in own else own  # logits that are not finite: no further drafts
            drawn = [q for q in probs[first : first + len(own)] if q is not None]
            drafts[seq.seq_id] = DraftTokens(own, torch.stack(drawn) if drawn else None)
            first += count
        return drafts
