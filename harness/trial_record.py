"""What a trial's record says: its figures, its verdict, and what a reader has to know of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pandas as pd
import psutil

from harness.equivalence import inexact
from harness.latencies import request_latencies
from harness.limits import Peaks
from harness.metrics import compute_metrics
from harness.observe import Examined, Observed
from harness.quality import quality_metrics
from harness.system.base import SystemUnderTest
from harness.texts import one_line
from harness.validity import NOT_EXAMINED, busy_host
from harness.warm_up import WarmUp
from workloads.stream import RequestStream


def record_of(
    system: SystemUnderTest,
    stream: RequestStream,
    described: Mapping[str, Any],
    warmed: WarmUp,
    roof: Peaks,
    seen: Observed,
    *,
    isolated: bool,
) -> dict[str, Any]:
    """run.json as it is when the window is over, but for what names the trial: `NOT_EXAMINED` yet.

    ``described``: its provenance, with the host's load before and after.
    """
    config = system.config
    window, metrics, warnings = compute_metrics(
        seen.requests,
        seen.steps,
        seen.telemetry,
        window_rule=stream.window_rule,
        warmup_s=stream.warmup_s,
        # An open loop knows its arrivals to the end from the start: who stops it ends the window there.
        last_arrival_s=stream.last_arrival_s if seen.completed else min(stream.last_arrival_s, seen.ended_s),
        max_num_seqs=system.max_num_seqs,
        kv_layout=str(config["kv_cache"]["name"]),
        slo={key: limit for key, limit in config["slo"].items() if key != "name"},
        price_per_hour=config["price"].get("per_hour"),
        extras={
            "weights_bytes": system.weights_bytes,
            "peak_memory_bytes": seen.peak_memory_bytes if isolated or config["device"]["name"] == "cuda" else None,
            "checkpoint_bytes": system.source.checkpoint_bytes,
            "startup_s": warmed.startup_s if isolated else None,
            "ready_s": warmed.ready_s if isolated else None,
            "peaks": roof,
            "speculation": system.speculation,
            "decode_costs": warmed.decode_costs,
            "ignore_eos": bool(config["workload"].get("sampling", {}).get("ignore_eos")),
            **transfers(seen.requests),
        },
    )
    stopped = ("aborted", ["stopped by the user"])
    status, reasons = judge(seen.requests, system.deaths) if seen.completed else stopped
    return {
        "status": status,
        "reasons": reasons,
        "provenance": {**described, "telemetry_cost": asdict(seen.telemetry_cost)},
        "config": dict(config),
        "axes": {
            group: chosen["name"]
            for group, chosen in config.items()
            if isinstance(chosen, Mapping) and "name" in chosen
        },
        "window": window,
        "metrics": metrics,
        "limits": {"flops_per_s": roof.flops_per_s, "bytes_per_s": roof.bytes_per_s, "source": roof.source},
        "validity": warnings
        + (unnatural_prompts(config["workload"]) if system.speculation else [])
        + not_exact(config)
        + busy_host(described["host_before"]["cpu_percent"], seen.telemetry, window, psutil.cpu_count() or 1)
        + system.notes(seen.requests, seen.steps)
        + ([f"telemetry ended early: {one_line(seen.telemetry_error)}"] if seen.telemetry_error else [])
        + [NOT_EXAMINED],
        "clock": "real",
        "emulated": list(system.emulated),
        "decode_costs": warmed.decode_costs,
        "linear_stages": None,
        "quality": None,
        "profile": None,
    }


def examined(run: Mapping[str, Any], after: Examined) -> dict[str, Any]:
    """The record with what its system showed after the window."""
    return {
        **run,
        "metrics": {**run["metrics"], **quality_metrics(after.quality)},
        "validity": [text for text in run["validity"] if text != NOT_EXAMINED] + after.trouble,
        "linear_stages": after.linear_stages,
        "quality": after.quality,
        "profile": after.profile.summary,
    }


def judge(requests: pd.DataFrame, died: Mapping[str, str] | None = None) -> tuple[str, list[str]]:
    """(status, reasons) of a trial that ran to its end: failed if any request failed, if none finished, or if a worker
    has died (by name, why) in whose place others may have done all of its work.

    Whoever fails leaves the machine to the others: the arm has done less work than the one beside it, and none of its
    figures compares. ``requests``: all of the trial's, inside its window or not. A rejected one has never begun.
    """
    outcomes = request_latencies(requests)["outcome"].to_list()
    finished, failed, rejected = (outcomes.count(what) for what in ("finished", "failed", "rejected"))
    if not failed and (finished or not outcomes):
        return ("failed", [f"worker {name} {why}" for name, why in died.items()]) if died else ("ok", [])
    blamed = "failed" if failed else "rejected"
    errors = requests["error"][[outcome == blamed for outcome in outcomes]].dropna()
    counts = f"of {len(outcomes)} requests {finished} finished, {failed} failed, {rejected} were rejected"
    return "failed", [": ".join([counts, *map(one_line, errors[:1])])]


def transfers(requests: pd.DataFrame) -> dict[str, float | None]:
    """Bytes and seconds of all keys and values that one worker copied from another; null where none did."""
    names = ("kv_transfer_bytes", "kv_transfer_s")
    return {name: float(requests[name].sum()) if requests[name].notna().any() else None for name in names}


def not_exact(config: Mapping[str, Any]) -> list[str]:
    """For an arm whose decoding changes what its model says."""
    why = inexact(config)
    return [] if why is None else [f"not exact: {why}"]


def unnatural_prompts(workload: Mapping[str, Any]) -> list[str]:
    """For a speculation arm: ``workload`` is its resolved config. A replay's prompts are the trace's own affair."""
    prompts = workload["prompts"]
    random = "random" in (prompts.get("law", prompts["name"]), prompts.get("style"))
    if not random or workload["arrivals"]["name"] == "replay":
        return []
    return ["unnatural prompts: random tokens; their acceptance rate says nothing about text"]
