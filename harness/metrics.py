"""Definitions of every metric (DESIGN section 6), as pure functions over a trial's tables.

``t0`` is the intended arrival. Times are seconds since the run's start. A quantity that has no value is None, never 0;
a failed request counts as +inf, so that losing the slowest requests cannot improve a percentile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.distribution import distribution
from harness.speculation import speculation_metrics
from harness.validity import peak_warnings, warnings_of

if TYPE_CHECKING:
    from harness.limits import Peaks

Floats = npt.NDArray[np.float64]

WINDOW_RULES = ("burst", "replay", "timed")
# Per request, and so what an SLO may bound.
REQUEST_METRICS = ("ttft_s", "tpot_s", "e2e_s", "normalized_latency_s", "queueing_s")
# Measured or known outside the tables; taken from ``extras`` as they are, null where it has none.
GIVEN_METRICS = (
    *("peak_memory_bytes", "weights_bytes", "startup_s", "perplexity", "kl_vs_bf16", "top1_agreement"),
    *("kv_transfer_bytes", "kv_transfer_s", "equivalence"),
)


@dataclass(frozen=True)
class Window:
    """The one interval that every rate counts in, both ends included. None: it does not exist (nothing ran)."""

    rule: str
    start_s: float | None
    end_s: float | None

    @property
    def length_s(self) -> float | None:
        if self.start_s is None or self.end_s is None or self.end_s <= self.start_s:
            return None
        return self.end_s - self.start_s

    def holds(self, times: Floats) -> npt.NDArray[np.bool_]:
        if self.start_s is None or self.end_s is None:
            return np.zeros(len(times), bool)
        return (times >= self.start_s) & (times <= self.end_s)


def measure_window(requests: pd.DataFrame, rule: str, warmup_s: float, last_arrival_s: float) -> Window:
    """Burst and replay: first scheduled step to last token; timed: after the warm-up to the last intended arrival.

    A target whose steps are not seen begins with the first request that it is given.
    """
    if rule not in WINDOW_RULES:
        raise ValueError(f"window rule {rule!r}, allowed: {', '.join(WINDOW_RULES)}")
    if rule == "timed":
        return Window(rule, float(warmup_s), float(last_arrival_s))
    scheduled = requests["scheduled_s"].dropna()
    if scheduled.empty:
        scheduled = requests.loc[requests["finish_reason"] != "rejected", "submitted_s"]
    ends = [times[-1] for times in requests["emission_times_s"] if len(times)]
    if scheduled.empty or not ends:
        return Window(rule, None, None)
    return Window(rule, float(scheduled.min()), float(max(ends)))


# --- per request ------------------------------------------------------------------------------------------------------


def request_latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """`REQUEST_METRICS` of each request, NaN where undefined, and ``outcome``: finished, failed or rejected.

    A reply without a token is a failure, whatever reason it ended with. Failed ones are +inf, except in queueing.
    """
    columns = ("finish_reason", "intended_s", "scheduled_s", "emission_times_s", "emission_tokens")
    rows = [latencies_of(*row) for row in zip(*(requests[name] for name in columns), strict=True)]
    return pd.DataFrame(rows, columns=[*REQUEST_METRICS, "outcome"])


def latencies_of(
    reason: str | None, t0: float, scheduled: float, times: Sequence[float] | Floats, counts: Sequence[int] | Floats
) -> dict[str, Any]:
    """One request's, as in `request_latencies`; ``times`` and ``counts``: seconds and tokens of its emissions."""
    n = int(sum(counts))
    values: dict[str, Any] = dict.fromkeys(REQUEST_METRICS, math.nan)
    values["queueing_s"] = scheduled - t0
    if reason == "rejected":
        outcome = "rejected"
    elif reason not in ("length", "stop") or n == 0:
        outcome = "failed"
        values |= dict.fromkeys(("ttft_s", "tpot_s", "e2e_s", "normalized_latency_s"), math.inf)
    else:
        outcome = "finished"
        values["ttft_s"], values["e2e_s"] = times[0] - t0, times[-1] - t0
        values["normalized_latency_s"] = values["e2e_s"] / n
        if n > counts[0]:
            values["tpot_s"] = (times[-1] - times[0]) / (n - counts[0])
    return {**values, "outcome": outcome}


def emission_gaps(requests: pd.DataFrame | Mapping[str, Sequence[Any]]) -> tuple[Floats, Floats]:
    """(itl, inter_emission): k gaps of (t - t')/k for an emission of k tokens, and t - t'. The first gives none."""
    raw = [np.empty(0)] + [np.diff(np.asarray(times, float)) for times in requests["emission_times_s"]]
    later = [np.empty(0, int)] + [np.asarray(counts, int)[1:] for counts in requests["emission_tokens"]]
    gaps, tokens = np.concatenate(raw), np.concatenate(later)
    return np.repeat(gaps / tokens, tokens), gaps


def meets_slo(latencies: pd.DataFrame, slo: Mapping[str, float]) -> npt.NDArray[np.bool_]:
    """Finished, and at or under every bound; one that is undefined (TPOT of a single token) has nothing to miss."""
    good = (latencies["outcome"] == "finished").to_numpy()
    for name, bound in slo.items():
        if name not in REQUEST_METRICS:
            raise ValueError(f"slo.{name}: not a latency of a request, allowed: {', '.join(REQUEST_METRICS)}")
        good = good & ~(latencies[name].to_numpy(float) > bound)
    return np.asarray(good, bool)


def tokens_inside(requests: pd.DataFrame, window: Window) -> npt.NDArray[np.int64]:
    """Each request's tokens that were emitted inside the window, whether or not it ended there."""
    inside = [
        int(np.asarray(counts, int)[window.holds(np.asarray(times, float))].sum())
        for times, counts in zip(requests["emission_times_s"], requests["emission_tokens"], strict=True)
    ]
    return np.array(inside, np.int64)


# --- per step ---------------------------------------------------------------------------------------------------------


def _quotient(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _total(frame: pd.DataFrame, column: str) -> float | None:
    """The column's sum; None if any value is unknown or there is none."""
    values = frame[column]
    return None if values.empty or values.isna().any() else float(values.sum())


def slot_utilization(steps: pd.DataFrame, max_num_seqs: int) -> float | None:
    """Rows that produced a kept token / rows there are, over these steps."""
    return _quotient(_total(steps, "kept_rows"), len(steps) * max_num_seqs)


def kv_shares(steps: pd.DataFrame) -> dict[str, float | None]:
    """used, internal, reserved_ahead and unusable as shares of what is reserved or unusable; they add up to 1.

    Each is a ratio of two integrals over the steps' time, so a step counts by its length and by what it holds.
    """
    seconds = (steps["end_s"] - steps["start_s"]).to_numpy(float)
    parts = {
        name: float(steps[f"kv_{name}_tokens"].to_numpy(float, na_value=np.nan) @ seconds)
        for name in ("used", "internal", "reserved_ahead", "unusable")
    }
    whole = sum(parts.values())
    return {name: part / whole if whole > 0 else None for name, part in parts.items()}


# --- telemetry --------------------------------------------------------------------------------------------------------


def energy_joules(telemetry: pd.DataFrame, window: Window) -> float | None:
    """The GPUs' energy counters at the window's end minus its start, read off between the two nearest samples.

    None where a GPU of the trial has no counter, or where a counter's samples do not enclose the window.
    """
    gpus = set(telemetry.loc[telemetry["source"].str.fullmatch(r"gpu\d+"), "source"])
    counters = telemetry[(telemetry["name"] == "energy_j") & telemetry["source"].str.startswith("gpu")]
    counters = counters.dropna(subset=["value"])
    if window.length_s is None or counters.empty or gpus - set(counters["source"]):
        return None
    joules = 0.0
    for _, samples in counters.groupby("source"):
        ordered = samples.sort_values("t_s")
        times, values = ordered["t_s"].to_numpy(float), ordered["value"].to_numpy(float)
        if times[0] > window.start_s or times[-1] < window.end_s:
            return None
        start, end = np.interp([window.start_s, window.end_s], times, values)
        joules += float(end - start)
    return joules


# --- all of them ------------------------------------------------------------------------------------------------------


def compute_metrics(
    requests: pd.DataFrame,
    steps: pd.DataFrame,
    telemetry: pd.DataFrame,
    *,
    window_rule: str,
    warmup_s: float = 0.0,
    last_arrival_s: float = 0.0,
    max_num_seqs: int | None = None,
    kv_layout: str | None = None,
    slo: Mapping[str, Any] | None = None,
    price_per_hour: float | None = None,
    extras: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(window, metrics, warnings) of one trial, from its three tables.

    window_rule: burst | replay | timed. kv_layout: the option of `kv_cache`; only contiguous has slot utilisation.
    slo: the config group, upper bounds by name of `REQUEST_METRICS`; without any there is no goodput. extras:
    `GIVEN_METRICS` by name, ``peaks`` (limits.Peaks, for MFU and MBU), ``decode_costs`` (as a record has them),
    ``speculation`` and ``ignore_eos`` (bool, for the warnings).
    """
    extras = extras or {}
    window = measure_window(requests, window_rule, warmup_s, last_arrival_s)
    seconds = window.length_s
    latencies = request_latencies(requests)
    counted = (
        window.holds(requests["intended_s"].to_numpy(float)) if window_rule == "timed" else np.ones(len(requests), bool)
    )
    chosen, outcomes = latencies[counted], latencies["outcome"][counted]
    accepted = requests[counted & (latencies["outcome"] != "rejected").to_numpy()]
    finished = requests[counted & (latencies["outcome"] == "finished").to_numpy()]  # means are over these alone
    inside = steps[window.holds(steps["start_s"].to_numpy(float))]
    tokens = tokens_inside(requests, window)
    output_tokens = int(tokens.sum())
    ended = window.holds(requests["finished_s"].to_numpy(float)) & (latencies["outcome"] == "finished").to_numpy()
    bounds = {name: bound for name, bound in (slo or {}).items() if name != "name" and bound is not None}
    good = meets_slo(latencies, bounds)
    good_in_window = int((good & counted).sum()) if bounds else None
    itl, inter_emission = emission_gaps(accepted)
    finished_itl, finished_inter_emission = emission_gaps(finished)
    shares = kv_shares(inside)

    metrics: dict[str, Any] = {
        "output_tokens_per_s": _quotient(output_tokens, seconds),
        "requests_per_s": _quotient(int(ended.sum()), seconds),
        "goodput_per_s": _quotient(good_in_window, seconds),
        "slo_attainment": _quotient(good_in_window, int(counted.sum())),
        "n_requests": int(counted.sum()),
        **{f"n_{outcome}": int((outcomes == outcome).sum()) for outcome in ("finished", "failed", "rejected")},
        "output_tokens": output_tokens,
        "steps": len(inside) if len(steps) else None,  # a target may not show them
        "slot_utilization": None,
        "slot_utilization_drain": None,
        "kv_utilization": shares["used"],
        "kv_waste": {name: shares[name] for name in ("internal", "reserved_ahead", "unusable")},
        "acceptance_rate": _quotient(_total(inside, "accepted_tokens"), _total(inside, "draft_tokens")),
        # Of one sequence, by the step that made them: exactly 1 without drafts.
        "tokens_per_step": _quotient(_total(inside, "emitted_tokens"), _total(inside, "kept_rows")),
        "speculation": speculation_metrics(inside, extras.get("decode_costs")),
        "prefix_hit_rate_planned": _quotient(
            _total(accepted, "planned_cached_tokens"), _total(accepted, "prompt_tokens")
        ),
        "prefix_hit_rate_observed": _quotient(
            _total(accepted, "cached_prompt_tokens"), _total(accepted, "prompt_tokens")
        ),
        "distinct_4gram_share": distinct_4gram_share(accepted["output_token_ids"]),
        **_utilisation(inside, seconds, extras.get("peaks")),
        "energy_j_per_output_token": _quotient(energy_joules(telemetry, window), output_tokens),
        "cost_per_million_output_tokens": _cost(price_per_hour, int(tokens[good].sum()), seconds),
        **{name: extras.get(name) for name in GIVEN_METRICS},
        **{
            name: distribution(chosen[name].dropna(), chosen.loc[outcomes == "finished", name].dropna())
            for name in REQUEST_METRICS
        },
        "itl_s": distribution(itl, finished_itl),
        "inter_emission_s": distribution(inter_emission, finished_inter_emission),
    }
    if kv_layout == "contiguous" and max_num_seqs:
        waits = (inside["waiting"] > 0).to_numpy(bool)
        metrics["slot_utilization"] = slot_utilization(inside[waits], max_num_seqs)
        metrics["slot_utilization_drain"] = slot_utilization(inside[~waits], max_num_seqs)
    described = {"start_s": window.start_s, "end_s": window.end_s, "rule": window.rule}
    speculation, ignore_eos = bool(extras.get("speculation")), bool(extras.get("ignore_eos"))
    warnings = warnings_of(requests, steps, telemetry, metrics, described, speculation, ignore_eos)
    return described, metrics, warnings + peak_warnings(metrics, extras.get("peaks"))


def distinct_4gram_share(outputs: Iterable[Sequence[int]]) -> float | None:
    """Distinct 4-grams / all 4-grams, each request by itself; None if no output has four tokens."""
    distinct = total = 0
    for ids in outputs:
        grams = list(zip(*(list(ids)[i:] for i in range(4)), strict=False))
        distinct += len(set(grams))
        total += len(grams)
    return _quotient(distinct, total)


def _utilisation(steps: pd.DataFrame, seconds: float | None, peaks: Peaks | None) -> dict[str, float | None]:
    work = {"flops": _total(steps, "flops"), "bytes": _total(steps, "bytes")}
    if peaks is None or seconds is None or None in work.values():
        return {"mfu": None, "mbu": None}
    from harness.limits import utilisation  # it imports torch, which the report does without

    return utilisation([work], peaks, seconds)


def _cost(price_per_hour: float | None, good_tokens: int, seconds: float | None) -> float | None:
    """Per million output tokens of requests that met every SLO (that finished, if there is none)."""
    good_per_hour = None if seconds is None else good_tokens * 3600 / seconds
    return None if price_per_hour is None else _quotient(price_per_hour * 1e6, good_per_hour)
