"""Definitions of every metric (DESIGN section 6), as pure functions over a trial's tables.

``t0`` is the intended arrival. Times are seconds since the run's start. A quantity that has no value is None, never 0;
a failed request counts as +inf, so that losing the slowest requests cannot improve a percentile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.distribution import distribution
from harness.latencies import REQUEST_METRICS, emission_gaps, meets_slo, request_latencies
from harness.speculation import speculation_metrics
from harness.validity import peak_warnings, warnings_of
from harness.window import Window, measure_window, tokens_inside

if TYPE_CHECKING:
    from harness.limits import Peaks

# Measured or known outside the tables; taken from ``extras`` as they are, null where it has none.
GIVEN_METRICS = (
    *("peak_memory_bytes", "weights_bytes", "checkpoint_bytes", "startup_s", "ready_s"),
    *("perplexity", "kl_vs_bf16", "top1_agreement", "kv_transfer_bytes", "kv_transfer_s", "equivalence"),
)


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

    None where a GPU of the trial has no counter, or where a counter's samples do not enclose the window, or go back in
    it (a driver that was loaded anew counts from 0).
    """
    gpus = set(telemetry.loc[telemetry["source"].str.fullmatch(r"gpu\d+"), "source"])
    counters = telemetry[(telemetry["name"] == "energy_j") & telemetry["source"].str.startswith("gpu")]
    counters = counters.dropna(subset=["value"])
    if window.length_s is None or counters.empty or gpus - set(counters["source"]):
        return None
    edges = np.array([window.start_s, window.end_s], float)
    joules = 0.0
    for _, samples in counters.groupby("source"):
        ordered = samples.sort_values("t_s")
        times, values = ordered["t_s"].to_numpy(float), ordered["value"].to_numpy(float)
        if times[0] > edges[0] or times[-1] < edges[1]:
            return None
        first, last = np.searchsorted(times, edges[0], "right") - 1, np.searchsorted(times, edges[1])
        if (np.diff(values[first : last + 1]) < 0).any():
            return None
        start, end = np.interp(edges, times, values)
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
    # A limit on what the target does not show is neither met nor missed.
    judged = not (
        "queueing_s" in bounds and latencies.loc[latencies["outcome"] == "finished", "queueing_s"].isna().any()
    )
    good_in_window = int((good & counted).sum()) if bounds and judged else None
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
        "preemptions": _total(accepted, "preemptions"),
        "distinct_4gram_share": distinct_4gram_share(accepted["output_token_ids"]),
        **_utilisation(steps, window, extras.get("peaks")),
        "energy_j_per_output_token": _quotient(energy_joules(telemetry, window), output_tokens),
        "cost_per_million_output_tokens": _cost(price_per_hour if judged else None, int(tokens[good].sum()), seconds),
        **{name: extras.get(name) for name in GIVEN_METRICS},
        **{
            name: distribution(chosen[name].dropna(), chosen.loc[outcomes == "finished", name].dropna())
            for name in REQUEST_METRICS
        },
        "ttft_urgent_s": _ttft_urgent(requests[counted], chosen),
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


def _ttft_urgent(requests: pd.DataFrame, latencies: pd.DataFrame) -> dict[str, Any]:
    """TTFT of the most urgent class alone, where the traffic has several; nothing was measured where it has not."""
    classes = requests["priority"]
    if classes.nunique() < 2:
        return distribution(())
    chosen = latencies[(classes == classes.min()).to_numpy(bool, na_value=False)]
    return distribution(chosen["ttft_s"].dropna(), chosen.loc[chosen["outcome"] == "finished", "ttft_s"].dropna())


def distinct_4gram_share(outputs: Iterable[Sequence[int]]) -> float | None:
    """Distinct 4-grams / all 4-grams, each request by itself; None if no output has four tokens."""
    distinct = total = 0
    for ids in outputs:
        grams = list(zip(*(list(ids)[i:] for i in range(4)), strict=False))
        distinct += len(set(grams))
        total += len(grams)
    return _quotient(distinct, total)


def _utilisation(steps: pd.DataFrame, window: Window, peaks: Peaks | None) -> dict[str, float | None]:
    seconds = window.length_s
    flops, moved_bytes = (_work_inside(steps, column, window) for column in ("flops", "bytes"))
    if peaks is None or seconds is None or flops is None or moved_bytes is None:
        return {"mfu": None, "mbu": None}
    from harness.limits import utilisation  # it imports torch, which the report does without

    return utilisation(flops, moved_bytes, peaks, seconds)


def _work_inside(steps: pd.DataFrame, column: str, window: Window) -> float | None:
    """The column's sum over the window. Of a timed one, which may begin and end amid steps, these count by their part
    inside; the others end with a step.
    """
    if window.rule != "timed" or window.start_s is None or window.end_s is None:
        return _total(steps[window.holds(steps["start_s"].to_numpy(float))], column)
    starts, ends = (steps[name].to_numpy(float) for name in ("start_s", "end_s"))
    inside = np.minimum(ends, window.end_s) - np.maximum(starts, window.start_s)
    there = inside > 0
    share = inside[there] / (ends - starts)[there]
    return _total(pd.DataFrame({column: steps[column].to_numpy(float)[there] * share}), column)


def _cost(price_per_hour: float | None, good_tokens: int, seconds: float | None) -> float | None:
    """Per million output tokens of requests that met every SLO (that finished, if there is none)."""
    good_per_hour = None if seconds is None else good_tokens * 3600 / seconds
    return None if price_per_hour is None else _quotient(price_per_hour * 1e6, good_per_hour)
