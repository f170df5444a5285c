"""What the charts need of every ok trial: small figures, made while its tables are in memory, which are not kept.

An arm may have any number of trials: no more than one trial's tables and one arm's latencies are held at a time. Only
the columns that are used are read, and into numpy: a pandas frame of a trial costs more than all that is done with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from harness.records import TrialRecord
from harness.report.sampling import Indices, ranks
from harness.report.work import COLUMNS, Work, step_work, summed
from harness.window import Window

PHASES = ("schedule", "prepare", "attention", "forward", "sample", "propose", "commit")
COUNTS = ("prefill_tokens", "decode_tokens", "draft_tokens", "accepted_tokens", "emitted_tokens")
STEP_COLUMNS = (*(f"{phase}_s" for phase in PHASES), *COUNTS, *(name for name in COLUMNS if name not in COUNTS))
REQUEST_COLUMNS = ("finish_reason", "intended_s", "emission_times_s", "emission_tokens")
DISTRIBUTIONS = ("ttft_s", "itl_s", "e2e_s")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DecodeMeans:
    """Over the steps that decode and prefill nothing; ``forward_s`` holds ``attention_s``, ``step_s`` both."""

    attention_s: float
    forward_s: float
    step_s: float
    sequences: float


@dataclass(frozen=True)
class TrialFigures:
    """Of one trial's steps; sums leave out what is null.

    attention_known: every step told its attention apart. decode: None where no step decodes and prefills nothing, or
    one of these did not tell its attention apart. decode_rate: tokens a second that a sequence gets in such steps.
    own_tokens: that no draft gave, None where a step did not tell what it emitted. work: by kind of step.
    """

    trial: int
    num_steps: int
    steps_s: float
    phases_s: Mapping[str, float]
    attention_known: bool
    num_decode_steps: int
    decode: DecodeMeans | None
    decode_rate: float | None
    draft_tokens: int
    accepted_tokens: int
    own_tokens: int | None
    work: Mapping[str, Work]


@dataclass(frozen=True)
class Curve:
    """What is drawn of ``n`` values in ascending order: those with these ranks (from 0) among the ``n_finite`` ones."""

    n: int
    n_finite: int
    ranks: Indices
    values: Floats


@dataclass(frozen=True)
class ArmFigures:
    """``trials``: each one's, in their order; ``curves``: `DISTRIBUTIONS` of all of them pooled."""

    trials: list[TrialFigures]
    curves: Mapping[str, Curve]


def arm_figures(trials: Iterable[TrialRecord], points: int) -> ArmFigures:
    """One pass over an arm's ok trials; ``points``: about as many are kept of a curve."""
    found: list[TrialFigures] = []
    pools: dict[str, list[Floats]] = {name: [] for name in DISTRIBUTIONS}
    for trial in trials:
        found.append(step_figures(trial))
        for name, values in latencies(trial).items():
            pools[name].append(values)
    return ArmFigures(found, {name: curve(pool, points) for name, pool in pools.items()})


def curve(pool: Sequence[Floats], points: int) -> Curve:
    values = np.concatenate([np.empty(0), *pool])
    finite = np.sort(values[np.isfinite(values)])
    kept = ranks(len(finite), points)
    return Curve(len(values), len(finite), kept, finite[kept])


def latencies(trial: TrialRecord) -> dict[str, Floats]:
    """`DISTRIBUTIONS` as its percentiles count them: a failed request's TTFT and E2E are inf, a rejected one has none.

    By the definitions of `harness.latencies`, all requests at once instead of one after the other.
    """
    table = trial.table("requests", REQUEST_COLUMNS)
    t0, reasons = _floats(table["intended_s"]), np.array(table["finish_reason"].to_pylist(), object)
    (times, lengths), (tokens, _) = (_lists(table[name]) for name in ("emission_times_s", "emission_tokens"))
    window = Window(*(trial.run["window"].get(name) for name in ("rule", "start_s", "end_s")))
    counted = (window.holds(t0) if window.rule == "timed" else np.ones(len(t0), bool)) & (reasons != "rejected")
    request = np.repeat(np.arange(len(t0)), lengths)  # of each emission
    num_tokens = np.bincount(request, tokens, len(t0))
    finished = ((reasons == "length") | (reasons == "stop")) & (num_tokens > 0)
    ends = lengths.cumsum()
    ttft, e2e = np.full(len(t0), np.inf), np.full(len(t0), np.inf)
    ttft[finished] = times[(ends - lengths)[finished]] - t0[finished]
    e2e[finished] = times[(ends - 1)[finished]] - t0[finished]
    ttft, e2e = ttft[counted], e2e[counted]
    later = (np.diff(request) == 0) & counted[request[1:]]  # emissions with one of their own request before them
    gaps, made = np.diff(times)[later], tokens[1:][later]
    itl = np.repeat(gaps / made, made)
    return {"ttft_s": ttft[~np.isnan(ttft)], "itl_s": itl, "e2e_s": e2e[~np.isnan(e2e)]}


def step_columns(trial: TrialRecord, names: Sequence[str]) -> dict[str, Floats]:
    """Columns of numbers of its steps, read now and not kept; NaN for null."""
    table = trial.table("steps", names)
    return {name: _floats(table[name]) for name in names}


def own_tokens(steps: Mapping[str, Floats]) -> Floats:
    """By step: what the target itself chose. Behind the accepted drafts of a sequence that is one, recovered where a
    draft was rejected and a bonus where none was, and of a prompt its first; NaN where the emitted are not known."""
    return steps["emitted_tokens"] - steps["accepted_tokens"]


def step_figures(trial: TrialRecord) -> TrialFigures:
    """Of the steps alone: nothing of its requests is read."""
    steps = step_columns(trial, STEP_COLUMNS)
    length = steps["end_s"] - steps["start_s"]
    seen = (steps["prefill_tokens"] == 0) & (steps["decode_tokens"] > 0)
    decoding = {name: column[seen] for name, column in steps.items()}
    means = None
    if seen.any() and not np.isnan(decoding["attention_s"]).any():
        columns = (decoding["attention_s"], decoding["forward_s"], length[seen], decoding["decode_tokens"])
        means = DecodeMeans(*(_mean(column) for column in columns))
    own = own_tokens(steps)
    return TrialFigures(
        trial=int(trial.run["trial"]),
        num_steps=len(length),
        steps_s=float(np.nansum(length)),
        phases_s={phase: float(np.nansum(steps[f"{phase}_s"])) for phase in PHASES},
        attention_known=not np.isnan(steps["attention_s"]).any(),
        num_decode_steps=int(seen.sum()),
        decode=means,
        decode_rate=_decode_rate(decoding),
        draft_tokens=int(np.nansum(steps["draft_tokens"])),
        accepted_tokens=int(np.nansum(steps["accepted_tokens"])),
        own_tokens=None if np.isnan(own).any() else int(own.sum()),
        work=summed(step_work(steps)),
    )


def _decode_rate(steps: Mapping[str, Floats]) -> float | None:
    """Of steps that decode and prefill nothing."""
    decoded = steps["decode_tokens"]
    spent = float((decoded * (steps["end_s"] - steps["start_s"])).sum())
    return float((decoded + steps["accepted_tokens"]).sum()) / spent if spent > 0 else None


def _mean(values: Floats) -> float:
    """Of what is not null; NaN of nothing."""
    known = np.count_nonzero(~np.isnan(values))
    return float(np.nansum(values)) / known if known else float("nan")


def _floats(column: pa.ChunkedArray) -> Floats:
    """Of a column of numbers; NaN for null."""
    return np.asarray(column.to_numpy(), float)


def _lists(column: pa.ChunkedArray) -> tuple[Any, Indices]:
    """Of a column of lists: all their numbers one after the other, and how many each has; none for null."""
    array = column.combine_chunks()
    return array.flatten().to_numpy(zero_copy_only=False), array.value_lengths().fill_null(0).to_numpy()
