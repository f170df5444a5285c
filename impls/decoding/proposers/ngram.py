"""Prompt lookup (Saxena, 2023): what followed the last few tokens when they occurred before, in prompt or output."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from impls.request import Sequence
from impls.seams import Arm, DraftTokens, ModelRunner, ModelShape, Proposer


@dataclass
class _Index:
    """For every n-gram that ends at or before ``indexed``: the index of the token after one of its occurrences."""

    indexed: int = 0
    follows: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramProposer(Proposer):
    """The longest suffix of ``min_ngram`` to ``max_ngram`` tokens that occurred before, and up to k tokens after it.

    match: which occurrence is followed. ``earliest`` (as vLLM) has the most text after it, so a repeating text drafts
    all k tokens; ``latest`` is nearer in topic but is often cut short by the end of the text. Occurrences may overlap
    the suffix. The index grows with the verified tokens: a proposal costs the new tokens, not the whole text.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        shape: ModelShape,
        num_draft_tokens: int = 4,
        min_ngram: int = 2,
        max_ngram: int = 4,
        match: str = "earliest",
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self.latest = match == "latest"
        self._indices: dict[str, _Index] = {}

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        own = arm.axes.get("proposer", {})
        low, high, match = own.get("min_ngram", 2), own.get("max_ngram", 4), own.get("match", "earliest")
        reasons = super().validate(arm)
        if not 1 <= low <= high:
            reasons.append(f"proposer.min_ngram={low} and max_ngram={high}: 1 <= min_ngram <= max_ngram is needed")
        if match not in ("earliest", "latest"):
            reasons.append(f"proposer.match={match} must be earliest or latest")
        return reasons

    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        drafts = {}
        for seq in sequences:
            count = min(k.get(seq.seq_id, 0), self.num_draft_tokens)
            token_ids = self._lookup(seq, count) if count > 0 else []
            if token_ids:
                drafts[seq.seq_id] = DraftTokens(token_ids)
        return drafts

    def forget(self, seq_id: str) -> None:
        self._indices.pop(seq_id, None)

    def _lookup(self, seq: Sequence, count: int) -> list[int]:
        tokens = seq.token_ids
        index = self._indices.setdefault(seq.seq_id, _Index())
        # The suffix itself, which nothing follows yet, stays out: only n-grams that end before the last token go in.
        for n in range(self.min_ngram, self.max_ngram + 1):
            first = max(index.indexed + 1, n)
            new = tokens[first - n : len(tokens) - 1]
            for end, gram in enumerate(zip(*(new[i:] for i in range(n)), strict=False), first):
                if self.latest:
                    index.follows[gram] = end
                else:
                    index.follows.setdefault(gram, end)
        index.indexed = max(index.indexed, len(tokens) - 1)
        for n in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            start = index.follows.get(tuple(tokens[-n:]))
            if start is not None:
                return tokens[start : start + count]
        return []
