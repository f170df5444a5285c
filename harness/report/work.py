"""FLOPs and bytes of steps by their kind: those that prefill anything, and those that only decode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

KINDS = ("prefill", "decode")
COLUMNS = ("prefill_tokens", "decode_tokens", "flops", "bytes", "start_s", "end_s")


@dataclass(frozen=True)
class StepWork:
    """FLOPs, bytes moved and seconds, a value a step."""

    flops: Floats
    bytes: Floats
    seconds: Floats


@dataclass(frozen=True)
class Work:
    """Sums over ``steps`` steps; ``least`` and ``most``: FLOP per byte of a single one."""

    steps: int
    flops: float
    bytes: float
    seconds: float
    least: float
    most: float

    @property
    def intensity(self) -> float:
        """FLOP per byte over all steps."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


def step_work(steps: Mapping[str, Floats]) -> dict[str, StepWork]:
    """By kind, of the steps whose FLOPs and bytes are known; ``steps``: `COLUMNS` by name."""
    prefill, decode = steps["prefill_tokens"], steps["decode_tokens"]
    flops, moved = steps["flops"], steps["bytes"]
    seconds = steps["end_s"] - steps["start_s"]
    known = (flops > 0) & (moved > 0) & (seconds > 0)
    kinds = (known & (prefill > 0), known & (prefill == 0) & (decode > 0))
    found = zip(KINDS, kinds, strict=True)
    return {kind: StepWork(flops[of], moved[of], seconds[of]) for kind, of in found if of.any()}


def summed(work: Mapping[str, StepWork]) -> dict[str, Work]:
    return {kind: _sums(each, each.flops / each.bytes) for kind, each in work.items()}


def _sums(work: StepWork, intensity: Floats) -> Work:
    flops, moved, seconds = (float(values.sum()) for values in (work.flops, work.bytes, work.seconds))
    return Work(len(intensity), flops, moved, seconds, float(intensity.min()), float(intensity.max()))


def pooled(trials: Iterable[Mapping[str, Work]]) -> dict[str, Work]:
    """All trials' steps, by kind."""
    found = list(trials)
    return {
        kind: Work(
            sum(work.steps for work in having),
            sum(work.flops for work in having),
            sum(work.bytes for work in having),
            sum(work.seconds for work in having),
            min(work.least for work in having),
            max(work.most for work in having),
        )
        for kind in KINDS
        if (having := [works[kind] for works in found if kind in works])
    }
