"""What numbers of fewer bits cost: metrics of what a model says, with their intervals over the texts it was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.data import Arm
from harness.report.intervals import INTERVAL_FROM, Bounds, beside
from harness.report.parts import Cell, fixed, percent

LOG_FROM = 50  # times as much as the least of an axis' values


@dataclass(frozen=True)
class Quality:
    """A metric of what the numbers cost; ``from_zero``: the axis starts there; ``by_decades``: it is logarithmic where
    arms lie far apart.
    """

    metric: str
    shown: str
    text: Callable[[float | None], str]
    unit: str = ""
    scale: float = 1.0
    from_zero: bool = False
    by_decades: bool = False

    @property
    def axis(self) -> str:
        return f"{self.shown} ({self.unit})" if self.unit else self.shown

    def scale_of(self, arms: Sequence[Arm]) -> dict[str, Any]:
        """Title and scale of its axis over these arms; a value of 0 is not to be found on a logarithmic one."""
        values = [value for arm in arms if (value := arm.metrics.get(self.metric)) is not None and value > 0]
        if self.by_decades and values and max(values) > LOG_FROM * min(values):
            return {"title": {"text": f"{self.axis}, log"}, "type": "log", "dtick": 1, "exponentformat": "power"}
        return {"title": {"text": self.axis}, **({"rangemode": "tozero"} if self.from_zero else {})}

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
    Quality("perplexity", "perplexity", fixed(3), by_decades=True),
    Quality("kl_vs_bf16", "KL to bf16", fixed(5), "nat", from_zero=True, by_decades=True),
    Quality("top1_agreement", "top-1 agreement", percent, "%", 100.0),
)
