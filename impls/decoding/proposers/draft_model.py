"""A second, cheaper model with the same vocabulary drafts; its K/V is extra layers in the sequences' own blocks."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from impls.decoding.proposers.chained import ChainedProposer
from impls.request import Sequence
from impls.seams import DraftTokens, ModelRunner, ModelShape


@dataclass(frozen=True)
class _Seen:
    """What the draft model was fed: the first ``num_tokens`` verified tokens, then these drafts."""

    num_tokens: int
    drafts: tuple[int, ...]


class DraftModelProposer(ChainedProposer):
    """Keeps, per sequence, what the draft model has seen, and feeds whatever is missing before it drafts.

    After a full acceptance that is the last draft, which was never fed, and the bonus token; after a rejection the
    recovered token, over the stale K/V of the rejected drafts.

    model: the draft model's option, None for the target itself; precision: in what numbers its weights are kept.
    """

    model = "draft"
    needs_draft_model = True

    def __init__(
        self,
        *,
        vocab_size: int,
        shape: ModelShape,
        num_draft_tokens: int = 4,
        model: str | None = None,
        precision: str = "int8",
        draft_sampling: str = "request",
    ) -> None:
        super().__init__(num_draft_tokens, draft_sampling)
        self.draft_model, self.draft_precision = model, precision
        self._seen: dict[str, _Seen] = {}

    def num_seen(self, seq: Sequence) -> int:
        seen = self._seen.get(seq.seq_id)
        if seen is None:
            return 0
        count = seen.num_tokens
        for draft, token in zip(seen.drafts, seq.token_ids[count:], strict=False):
            if draft != token:
                break
            count += 1
        return count

    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        proposed = super().propose(sequences, k, runner)
        for seq in sequences:
            if min(k.get(seq.seq_id, 0), self.num_draft_tokens) > 0:
                drafted = proposed[seq.seq_id].token_ids if seq.seq_id in proposed else []
                self._seen[seq.seq_id] = _Seen(seq.num_tokens, tuple(drafted[:-1]))
        return proposed

    def truncate(self, seq_id: str, num_tokens: int) -> None:
        """It runs ahead of the target, so it may have written to a block that is not kept."""
        if (seen := self._seen.get(seq_id)) is not None:
            self._seen[seq_id] = _Seen(min(seen.num_tokens, num_tokens), ())

    def forget(self, seq_id: str) -> None:
        self._seen.pop(seq_id, None)
