"""What numbers of fewer bits cost: metrics of what a model says, with their intervals over the texts it was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.report.data import Arm
from harness.report.intervals import INTERVAL_FROM, Bounds, beside
from harness.report.parts import Cell, fixed, percent


@dataclass(frozen=True)
class Quality:
    """A metric of what the numbers cost; ``from_zero``: the axis starts there."""

    metric: str
    shown: str
    text: Callable[[float | None], str]
    unit: str = ""
    scale: float = 1.0
    from_zero: bool = False

    @property
    def axis(self) -> str:
        return f"{self.shown} ({self.unit})" if self.unit else self.shown

    def bounds(self, arm: Arm) -> Bounds:
        """As recorded in the trial that measured it, where its texts are as many as trials would have to be."""
        recorded: dict[str, Any] = next((quality for trial in arm.ok if (quality := trial.run.get("quality"))), {})
        if self.metric not in recorded or (recorded.get("texts") or 0) < INTERVAL_FROM:
            return None, None
        return recorded[self.metric]["low"], recorded[self.metric]["high"]

    def cell(self, arm: Arm) -> Cell:
        return beside(arm.cell(self.metric, self.text), self.bounds(arm), self.text)


EQUAL_OUTPUT = Quality("equivalence", "equal output", percent)
DRAWN = (
    Quality("perplexity", "perplexity", fixed(3)),
    Quality("kl_vs_bf16", "KL to bf16", fixed(5), "nat", from_zero=True),
    Quality("top1_agreement", "top-1 agreement", percent, "%", 100.0),
)
