"""Several tokens a step: the target scores a proposer's drafts in one pass and the verifier keeps what is sound."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from impls.decoding import sampler, verifier
from impls.decoding.draft_length import AdaptiveDraftLength
from impls.decoding.synthetic_acceptance import accept_at_rate
from impls.decoding.typical_acceptance import accept_typical
from impls.request import Sequence
from impls.seams import Arm, DecodeCosts, Decoder, DraftTokens, NonFiniteLogitsError

DRAFT_LENGTHS = ("fixed", "adaptive")
ACCEPTANCE = ("exact", "typical")
EPSILON, DELTA = 0.09, 0.3  # as Medusa's own code has them


class SpeculativeDecoder(Decoder):
    """Rejection sampling of drafts; greedy and sampled sequences may share a batch, with 0 to k drafts each.

    acceptance: ``exact`` leaves the target's distribution as it is (`verifier`); ``typical`` is Medusa's rule for
    sampled requests, by ``epsilon`` and ``delta``, which does not (`typical_acceptance`).
    acceptance_rate: None verifies. A number lets each draft stand with that probability instead, whatever the
    target says: for synthetic weights only, and labelled in ``emulated``.
    draft_length: ``fixed`` asks for all the drafts that the proposer may give; ``adaptive`` for as many of them, or
    none, as are expected to pay (`AdaptiveDraftLength`).
    """

    uses_proposer = True

    def __init__(
        self,
        *,
        vocab_size: int,
        acceptance: str = "exact",
        epsilon: float = EPSILON,
        delta: float = DELTA,
        acceptance_rate: float | None = None,
        draft_length: str = "fixed",
    ) -> None:
        self.vocab_size = vocab_size
        self._typical = (epsilon, delta) if acceptance == "typical" else None
        self.acceptance_rate = acceptance_rate
        self._adaptive = AdaptiveDraftLength() if draft_length == "adaptive" else None
        self.emulated = None if acceptance_rate is None else f"acceptance rate set to {acceptance_rate:g}"

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        reasons = []
        own = arm.axes.get("decoding", {})
        rate, draft_length = own.get("acceptance_rate"), own.get("draft_length", "fixed")
        if draft_length not in DRAFT_LENGTHS:
            reasons.append(f"decoding.draft_length={draft_length} must be one of {', '.join(DRAFT_LENGTHS)}")
        acceptance = own.get("acceptance", "exact")
        epsilon, delta = own.get("epsilon", EPSILON), own.get("delta", DELTA)
        if acceptance not in ACCEPTANCE:
            reasons.append(f"decoding.acceptance={acceptance} must be one of {', '.join(ACCEPTANCE)}")
        numbers = all(isinstance(each, int | float) for each in (epsilon, delta))
        if not (numbers and 0 < epsilon < 1 and delta > 0):
            reasons.append(f"decoding.epsilon={epsilon}, delta={delta}: 0 < epsilon < 1 and 0 < delta are needed")
        if rate is not None:
            if acceptance != "exact":
                reasons.append(f"decoding.acceptance_rate decides alone: not with decoding.acceptance={acceptance}")
            if not 0 <= rate <= 1:
                reasons.append(f"decoding.acceptance_rate={rate} must lie in [0, 1]")
            model = arm.axes.get("model", {})
            if model.get("source") != "synthetic" or model.get("path"):
                origin = model.get("path") or model.get("source")
                reasons.append(f"decoding.acceptance_rate is for synthetic weights: {origin} has a rate of its own")
        num_draft_tokens = arm.axes.get("proposer", {}).get("num_draft_tokens", 0)
        if num_draft_tokens < 1:
            reasons.append(f"decoding=speculative needs proposer.num_draft_tokens >= 1, not {num_draft_tokens}")
        return reasons

    @classmethod
    def inexact(cls, options: Mapping[str, Any]) -> str | None:
        if (rate := options.get("acceptance_rate")) is not None:
            return f"each draft stands with probability {rate:g}"
        if options.get("acceptance", "exact") == "typical":
            return "typical acceptance of drafts; at a temperature above 0 the output is not the target's distribution"
        return None

    def decode(self, sequences: Seq[Sequence], logits: Tensor, drafts: Mapping[str, DraftTokens]) -> list[list[int]]:
        """Accepted drafts, then one recovered or bonus token. Raises NonFiniteLogitsError naming those whose first row
        is unsound (nothing was changed, so the others can be decoded again without them), ValueError where rows, drafts
        and vocabulary do not match."""
        self._check(sequences, logits, drafts)
        target: list[int] = sampler.argmax(logits).tolist()
        starts = verifier.first_rows(sequences)
        if self.acceptance_rate is None:
            accepted = verifier.accept_greedy(sequences, target)
        else:
            accepted = accept_at_rate(sequences, self.acceptance_rate, logits.device)
        last = [target[row] for row in verifier.final_rows(starts, accepted)]

        sampled = [i for i, seq in enumerate(sequences) if seq.request.sampling.temperature > 0]
        if sampled:
            part = [sequences[i] for i in sampled]
            rows = [row for i in sampled for row in range(starts[i], starts[i] + len(sequences[i].draft_token_ids) + 1)]
            params = [seq.request.sampling for seq in part for _ in range(len(seq.draft_token_ids) + 1)]
            own = logits if len(rows) == logits.shape[0] else logits[rows]
            probs = sampler.distribution(own, params)
            if self._typical is not None:
                counts = accept_typical(part, probs, *self._typical)
                tokens = [target[starts[i] + count] for i, count in zip(sampled, counts, strict=True)]
            else:
                verification = verifier.RandomVerification(part, probs, drafts)
                counts = verification.accept() if self.acceptance_rate is None else [accepted[i] for i in sampled]
                tokens = verification.final_tokens(counts)
            for i, count, token in zip(sampled, counts, tokens, strict=True):
                accepted[i], last[i] = count, token
        if min(target, default=0) < 0:
            self._stop_before_unsound(sequences, target, accepted, last)
        if self._adaptive is not None:
            for seq, count in zip(sequences, accepted, strict=True):
                self._adaptive.observe(seq.seq_id, len(seq.draft_token_ids), count)
        return [[*seq.draft_token_ids[:n], token] for seq, n, token in zip(sequences, accepted, last, strict=True)]

    def _stop_before_unsound(
        self, sequences: Seq[Sequence], target: Seq[int], accepted: list[int], last: list[int]
    ) -> None:
        """The next step reads an unsound row first, as it would be without drafts: what stands before it is kept, which
        may end the sequence. Behind a draft that fell nobody reads one. NonFiniteLogitsError for those at whom it is
        first now."""
        unsound = []
        for i, (seq, start) in enumerate(zip(sequences, verifier.first_rows(sequences), strict=True)):
            read = target[start : start + accepted[i] + 1]
            if min(read) >= 0:
                continue
            if (stands := read.index(-1)) > 0:
                accepted[i], last[i] = stands - 1, seq.draft_token_ids[stands - 1]
            else:
                unsound.append(seq.seq_id)
        if unsound:
            raise NonFiniteLogitsError(unsound)

    def draft_lengths(self, most: Mapping[str, int]) -> Mapping[str, int]:
        return most if self._adaptive is None else self._adaptive.choose(most)

    def calibrate(self, costs: DecodeCosts) -> None:
        if self._adaptive is not None:
            self._adaptive.calibrate(costs)

    def forget(self, seq_id: str) -> None:
        if self._adaptive is not None:
            self._adaptive.forget(seq_id)

    def _check(self, sequences: Seq[Sequence], logits: Tensor, drafts: Mapping[str, DraftTokens]) -> None:
        expected = (sum(verifier.row_counts(sequences)), self.vocab_size)
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits {tuple(logits.shape)}, expected {expected}")
        for seq in sequences:
            drafted = seq.draft_token_ids
            if any(not 0 <= token < self.vocab_size for token in drafted):
                raise ValueError(f"drafts {drafted} of {seq.seq_id} are outside the vocabulary of {self.vocab_size}")
            proposed = drafts.get(seq.seq_id)
            if proposed is not None and proposed.token_ids[: len(drafted)] != drafted:
                raise ValueError(f"drafts {drafted} of {seq.seq_id} are not those proposed: {proposed.token_ids}")
