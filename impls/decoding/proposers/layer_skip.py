"""The target's own first layers draft, then final norm and head (LayerSkip: Elhoushi et al., 2024)."""

from __future__ import annotations

from impls.decoding.proposers.chained import ChainedProposer
from impls.request import Sequence
from impls.seams import Arm, ModelShape


class LayerSkipProposer(ChainedProposer):
    """No second model and no second cache: K/V of the first layers are the target's own, for every verified token.

    What drafting writes past them is what the verification step would write there, and does.

    num_layers: how many layers draft; None: a quarter of the target's, at least one.
    """

    model = "target"

    def __init__(
        self,
        *,
        vocab_size: int,
        shape: ModelShape,
        num_draft_tokens: int = 4,
        num_layers: int | None = None,
        draft_sampling: str = "request",
    ) -> None:
        super().__init__(num_draft_tokens, draft_sampling, num_layers or max(1, shape.num_layers // 4))

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        reasons = super().validate(arm)
        num_layers = arm.axes.get("proposer", {}).get("num_layers")
        if num_layers is not None and not 1 <= num_layers < arm.model.num_layers:
            reasons.append(f"proposer.num_layers={num_layers} must lie in 1..{arm.model.num_layers - 1}")
        return reasons

    def num_seen(self, seq: Sequence) -> int:
        return seq.num_computed_tokens
