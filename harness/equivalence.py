"""Do the arms produce the same tokens? If not: where they part, and how close the reference's choice was there.

DESIGN: in FP32 greedy tokens agree up to the first position where the reference's two best logits lie within 1e-3; in
other precisions a difference is a warning only where that gap exceeds 0.5 and the precisions are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from harness.arm import option
from impls.build import build_engine
from impls.models.source import ModelSource
from impls.step_batch import BatchRow, build_batch

MAX_TEACHER_FORCED = 8
FP32_TIE = 1e-3
LOW_PRECISION_TIE = 0.5


@dataclass(frozen=True)
class Divergence:
    """The first output position at which two arms' greedy tokens of one request differ; ``gap`` from the reference."""

    request_id: str
    position: int
    reference_token: int
    token: int
    gap: float | None = None


@dataclass(frozen=True)
class Agreement:
    """Of ``requests`` that both arms finished, ``identical`` agree in every token; the others are in ``divergences``."""

    requests: int
    identical: int
    common_tokens: int  # tokens before the first divergence, over all requests
    tokens: int
    divergences: tuple[Divergence, ...]


def compare(reference: pd.DataFrame, other: pd.DataFrame) -> Agreement:
    """Token by token over the requests that both finished; requests.parquet of one trial of each arm."""
    mine = {row.request_id: row for row in reference.itertuples() if row.finish_reason in ("length", "stop")}
    requests = identical = common = total = 0
    divergences: list[Divergence] = []
    for row in other.itertuples():
        twin = mine.get(row.request_id)
        if twin is None or row.finish_reason not in ("length", "stop"):
            continue
        ours, theirs = list(twin.output_token_ids), list(row.output_token_ids)
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        requests += 1
        total += len(ours)
        common += len(ours) if first is None else first
        if first is None:
            identical += len(ours) == len(theirs)
        else:
            divergences.append(Divergence(str(row.request_id), first, int(ours[first]), int(theirs[first])))
    return Agreement(requests, identical, common, total, tuple(divergences))


class TeacherForcer:
    """The arm's own weights and precision through the `reference` attention, one sequence at a time."""

    def __init__(self, config: Mapping[str, Any], source: ModelSource, clock: Any) -> None:
        arm = {**config, "attention": option("attention", "reference"), "execution": option("execution", "eager")}
        arm["batching"] = option("batching", "continuous")
        arm["decoding"] = option("decoding", "autoregressive")
        self._engine = build_engine(arm, source, clock)

    def top2_gap(self, token_ids: Sequence[int]) -> float:
        """Logit of the best token minus the second best, for the position after ``token_ids``."""
        engine = self._engine
        if not engine.kv.allocate("forced", len(token_ids)):
            raise ValueError(f"the KV budget cannot hold {len(token_ids)} tokens to teacher-force")
        try:
            row = BatchRow("forced", token_ids, 0, engine.kv.block_table("forced"), 1, len(token_ids))
            with torch.inference_mode():
                logits, _ = engine.executor.execute(build_batch([row], engine.kv.block_size, engine.device))
            best, second = logits[0].topk(2).values.tolist()
        finally:
            engine.kv.free("forced")
        return float(best - second)

    def close(self) -> None:
        self._engine.close()


def judge(
    agreement: Agreement, prompts: Mapping[str, Sequence[int]], outputs: Mapping[str, Sequence[int]],
    forcer: TeacherForcer, *, precision: str, reference_precision: str,
) -> tuple[tuple[Divergence, ...], list[str]]:
    """The first divergences with their gap, and a warning for each that the arithmetic does not excuse."""
    judged: list[Divergence] = []
    warnings: list[str] = []
    tie = FP32_TIE if precision == reference_precision == "fp32" else LOW_PRECISION_TIE
    for d in agreement.divergences[:MAX_TEACHER_FORCED]:
        gap = forcer.top2_gap([*prompts[d.request_id], *outputs[d.request_id][: d.position]])
        judged.append(Divergence(d.request_id, d.position, d.reference_token, d.token, gap))
        if precision == reference_precision and gap > tie:
            warnings.append(
                f"token mismatch: request {d.request_id} differs at output token {d.position} although the reference's "
                f"top-2 logit gap there is {gap:.3g} (allowed: {tie:g})"
            )
    return tuple(judged), warnings
