"""Do the arms produce the same tokens? If not: where they part, and how close the reference's choice was there.

DESIGN: in FP32 greedy tokens agree up to the first position where the reference's two best logits lie within 1e-3; in
other precisions a difference is a warning only where that gap exceeds 0.5 and the precisions are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from harness.arm import option
from harness.drive import RealClock
from harness.records import TrialRecord, read_run, write_json
from harness.summary import traffic_content
from impls.build import build_engine, kv_dtype_name, locate, max_model_len, options_of
from impls.models.source import open_model
from impls.request import Request
from impls.step_batch import BatchRow, build_batch
from workloads import build_stream

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
class OtherLength:
    """Two arms' outputs of one request of which one goes on where the other has ended; in tokens."""

    request_id: str
    reference_length: int
    length: int


@dataclass(frozen=True)
class Agreement:
    """Of ``requests`` that both arms finished, ``identical`` agree in every token; the others are in ``divergences``,
    or in ``other_lengths``: what ends an output is the last of its tokens, or its limit, so no rounding explains those.
    """

    requests: int
    identical: int
    common_tokens: int  # tokens before the first divergence, over all requests
    tokens: int
    divergences: tuple[Divergence, ...]
    other_lengths: tuple[OtherLength, ...] = ()


def compare(reference: pd.DataFrame, other: pd.DataFrame) -> Agreement:
    """Token by token over the requests that both finished; requests.parquet of one trial of each arm."""
    mine = finished_outputs(reference)
    requests = identical = common = total = 0
    divergences: list[Divergence] = []
    other_lengths: list[OtherLength] = []
    for request_id, theirs in finished_outputs(other).items():
        ours = mine.get(request_id)
        if ours is None:
            continue
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        requests += 1
        total += len(ours)
        common += min(len(ours), len(theirs)) if first is None else first
        if first is not None:
            divergences.append(Divergence(request_id, first, ours[first], theirs[first]))
        elif len(ours) != len(theirs):
            other_lengths.append(OtherLength(request_id, len(ours), len(theirs)))
        else:
            identical += 1
    return Agreement(requests, identical, common, total, tuple(divergences), tuple(other_lengths))


def finished_outputs(requests: pd.DataFrame) -> dict[str, list[int]]:
    """Output token ids of the requests that came to their own end."""
    ended = requests[requests.finish_reason.isin(["length", "stop"])]
    return {
        str(row["request_id"]): [int(token) for token in row["output_token_ids"]]
        for row in ended[["request_id", "output_token_ids"]].to_dict("records")
    }


class TeacherForcer:
    """The arm's own weights and precision through the `reference` attention, one sequence at a time."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        arm = {**config, "attention": option("attention", "reference"), "execution": option("execution", "eager")}
        arm["batching"] = option("batching", "continuous")
        arm["decoding"] = option("decoding", "autoregressive")
        self._engine = build_engine(arm, open_model(config["model"]), RealClock())

    def top2_gap(self, token_ids: Sequence[int]) -> float:
        """Logit of the best token minus the second best, for the position after ``token_ids``."""
        engine = self._engine
        if not engine.kv.allocate("forced", len(token_ids)):
            raise RuntimeError(f"the KV budget cannot hold {len(token_ids)} tokens to teacher-force")
        try:
            row = BatchRow("forced", token_ids, 0, engine.kv.block_table("forced"), 1, len(token_ids))
            with torch.inference_mode():
                logits, _ = engine.executor.execute(build_batch([row], engine.kv.block_size, engine.device))
            best, second = logits[0].topk(2).values.tolist()
        finally:
            engine.kv.free("forced")
        return float(best - second)

    def judge(
        self, agreement: Agreement, requests: Mapping[str, Request], reference: pd.DataFrame, limit: int | None
    ) -> list[Divergence]:
        """The first ``limit`` divergences (None: all) with the reference's gap at each."""
        outputs = finished_outputs(reference)

        def prompt(request_id: str) -> Sequence[int]:
            return requests[request_id].prompt_token_ids

        return [
            replace(d, gap=self.top2_gap([*prompt(d.request_id), *outputs[d.request_id][: d.position]]))
            for d in agreement.divergences[:limit]
        ]


def check_study(
    run_dir: Path, configs: Mapping[str, Mapping[str, Any]], baseline: str, versus: Mapping[str, str | None]
) -> None:
    """After the timed trials: compare each arm's greedy tokens of its first ok trial with those that its ``versus``, or
    the baseline where it has none, gave in that trial.

    Adds `equivalence` to these records: `metrics.equivalence` is the share of requests that are identical (in FP32 up
    to a near-tie), the details and any *token mismatch* stand beside it. ``configs`` are the arms' composed
    configurations, never the recorded ones.
    """
    record = read_run(run_dir)
    ok = {arm: {t.run["trial"]: t for t in record.of_arm(arm) if t.run["status"] == "ok"} for arm in configs}
    pairs = [(versus.get(arm) or baseline, arm) for arm in configs]
    forcers: dict[str, TeacherForcer] = {}  # one at a time, as each holds a model
    for to, arm in sorted((pair for pair in pairs if pair[0] != pair[1]), key=lambda pair: pair[0]):
        config, other = configs[arm], configs[to]
        trial = next((trial for number, trial in ok[arm].items() if number in ok[to]), None)
        if trial is None or "equivalence" in trial.run or config["workload"] != other["workload"]:
            continue
        if inexact(config) or inexact(other):
            continue  # no one claims that these tokens are the target's
        reference = ok[to][trial.run["trial"]]
        if traffic_content(trial.run) != traffic_content(reference.run):
            continue  # other requests under the same names
        requests = greedy_requests(config, trial.run["seed"])
        agreement = compare(reference.requests[reference.requests.request_id.isin(list(requests))], trial.requests)
        if agreement.requests == 0:
            continue
        judged: list[Divergence] = []
        in_fp32 = is_fp32(config) and is_fp32(other)
        if agreement.divergences:
            if to not in forcers:
                forcers.clear()
                forcers[to] = TeacherForcer(other)
            limit = None if in_fp32 else MAX_TEACHER_FORCED
            judged = forcers[to].judge(agreement, requests, reference.requests, limit)
        _record(trial, reference, agreement, judged, same_precision(config, other), in_fp32=in_fp32)


def inexact(config: Mapping[str, Any]) -> str | None:
    """Why this arm's output is not what its model alone would give, as its decoding says; None: it is."""
    decoding = config["decoding"]
    why: str | None = locate(decoding).inexact(options_of(decoding))
    return why


def greedy_requests(config: Mapping[str, Any], seed: int) -> dict[str, Request]:
    """The trial's requests again, from its seed; a sampled request has no one right answer and is left out."""
    source = open_model(config["model"])
    stream = build_stream(
        config["workload"],
        seed=seed,
        tokenizer=source.tokenizer,
        max_model_len=max_model_len(config, source),
        vocab_size=source.shape.vocab_size,
    )
    sent = (sample for request in stream.initial() for sample in request.samples())
    return {r.request_id: r for r in sent if r.sampling.temperature == 0}


def is_fp32(config: Mapping[str, Any]) -> bool:
    """Its keys and values too: where they are rounded, the last bit of a GEMM decides to which side."""
    return bool(config["precision"]["name"] == "fp32" and kv_dtype_name(config) == "fp32")


def same_precision(config: Mapping[str, Any], reference: Mapping[str, Any]) -> bool:
    """Of the layers, and of the keys and values."""
    equal = config["precision"]["name"] == reference["precision"]["name"]
    return bool(equal and kv_dtype_name(config) == kv_dtype_name(reference))


def _record(
    trial: TrialRecord,
    reference: TrialRecord,
    agreement: Agreement,
    judged: Sequence[Divergence],
    equal: bool,
    *,
    in_fp32: bool,
) -> None:
    """Write the verdict into the trial's run.json."""
    tie = FP32_TIE if in_fp32 else LOW_PRECISION_TIE
    excused = sum(d.gap is not None and d.gap <= tie for d in judged) if in_fp32 else 0
    run = dict(trial.run)
    run["metrics"] = {**run["metrics"], "equivalence": (agreement.identical + excused) / agreement.requests}
    run["equivalence"] = {
        "reference": reference.run["arm"],
        "requests": agreement.requests,
        "identical": agreement.identical,
        "common_tokens": agreement.common_tokens,
        "tokens": agreement.tokens,
        "divergences": [asdict(d) for d in judged],
    }
    if equal:
        run["validity"] = [*run["validity"], *mismatches(judged, tie), *ends(agreement)]
    write_json(trial.path / "run.json", run)


def ends(agreement: Agreement) -> list[str]:
    """A warning for each output that is the reference's but for its end; only for arms of equal precision."""
    return [
        f"token mismatch: request {other.request_id} ends after {other.length} output tokens, all of them the "
        f"reference's, which ends after {other.reference_length}"
        for other in agreement.other_lengths
    ]


def mismatches(judged: Sequence[Divergence], tie: float) -> list[str]:
    """A warning for each divergence that the arithmetic does not excuse; only for arms of equal precision."""
    return [
        f"token mismatch: request {d.request_id} differs at output token {d.position} although the reference's top-2 "
        f"logit gap there is {d.gap:.3g} (allowed: {tie:g})"
        for d in judged
        if d.gap is not None and d.gap > tie
    ]
