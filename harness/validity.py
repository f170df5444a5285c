"""Warnings that a trial's own tables can justify: what a reader must know before believing its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.distribution import nearest_rank

if TYPE_CHECKING:  # it imports torch, which the report does without
    from harness.limits import Peaks

FEW_REQUESTS = 30
FEW_FOR_P99 = 100
REPETITIVE_SHARE = 0.5
CLIENT_LAG_S = 0.010
BUSY_HOST_PERCENT = 20.0
BUSY_HOST_S = 0.5  # of samples: CPU time is counted in ticks of 10 ms, and over less the shares say little
GC_PAUSE_S = 0.001  # of one sample; automatic collection is off while a trial is measured
# The bits of NVML's `nvmlDeviceGetCurrentClocksEventReasons` that slow a GPU down (nvml.h, nvmlClocksEventReason*).
THROTTLE_REASONS = {
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clock setting",
}
# Of a trial that is recorded as soon as its window is over, until what follows it is.
NOT_EXAMINED = "not examined: its process ended after the window, before its linear layers, quality and profile"
NO_THROTTLING = 0x001 | 0x002  # idle; clocks that somebody has set

Floats = npt.NDArray[np.float64]


def warnings_of(
    requests: pd.DataFrame,
    steps: pd.DataFrame,
    telemetry: pd.DataFrame,
    metrics: Mapping[str, Any],
    window: Mapping[str, Any],
    speculation: bool,
    ignore_eos: bool,
) -> list[str]:
    """One line each, in a fixed order. ``metrics`` and ``window`` as in run.json."""
    found = []
    if metrics["n_requests"] < FEW_REQUESTS:
        found.append(f"too few requests: {metrics['n_requests']} in the window, at least {FEW_REQUESTS} wanted")
    if metrics["n_failed"]:
        found.append(f"failed requests: {metrics['n_failed']} of {metrics['n_requests']}; they count as inf")
    if metrics["n_rejected"]:
        found.append(f"rejected requests: {metrics['n_rejected']} of {metrics['n_requests']}; left out of percentiles")
    thin = [f"{k} ({v['n']})" for k, v in metrics.items() if isinstance(v, dict) and 0 < v.get("n", 0) < FEW_FOR_P99]
    if thin:
        found.append(f"p99 of fewer than {FEW_FOR_P99} values: {', '.join(thin)}")
    if window["rule"] == "timed":
        found += _steadiness(requests, window)
    lag = client_lag(requests, steps)
    if lag > CLIENT_LAG_S:
        found.append(f"client lag: p99 of submission after it could have been is {1000 * lag:.1f} ms")
    found += gc_warnings(telemetry, window)
    found += gpu_warnings(telemetry, window)
    if speculation:
        found += _repetition(metrics["distinct_4gram_share"], ignore_eos)
    return found


def peak_warnings(metrics: Mapping[str, Any], peaks: Peaks | None) -> list[str]:
    """A device cannot do more than its best: the peak is too low, or the work is overcounted."""
    if peaks is None:
        return []
    held = (
        ("MFU", metrics["mfu"], f"{(peaks.flops_per_s or 0) / 1e9:.4g} GFLOP/s"),
        ("MBU", metrics["mbu"], f"{(peaks.bytes_per_s or 0) / 1e9:.4g} GB/s"),
    )
    return [
        f"{name} above 1: {share:.2f} of the {peaks.source} peak of {peak}, which is lower than what this arm reached"
        for name, share, peak in held
        if share is not None and share > 1
    ]


def _steadiness(requests: pd.DataFrame, window: Mapping[str, Any]) -> list[str]:
    start, end = window["start_s"], window["end_s"]
    if end <= start:
        return ["no steady state: the warm-up leaves no window before the last arrival"]
    third = (end - start) / 3
    first, last = in_system(requests, start, start + third), in_system(requests, end - third, end)
    if abs(last - first) <= 0.5 * min(first, last) + 2:
        return []
    return [f"no steady state: {first:.1f} requests in the system in the window's first third, {last:.1f} in its last"]


def in_system(requests: pd.DataFrame, start_s: float, end_s: float) -> float:
    """Mean number of requests that have arrived and not ended, over an interval."""
    arrived = requests["intended_s"].to_numpy(float)
    ended = requests["finished_s"].fillna(math.inf).to_numpy(float)
    overlap = np.minimum(ended, end_s) - np.maximum(arrived, start_s)
    return float(np.maximum(overlap, 0).sum() / (end_s - start_s))


def client_lag(requests: pd.DataFrame, steps: pd.DataFrame) -> float:
    """p99 of how long after its intended arrival, and after the step then running, a request was submitted.

    A client that shares the engine's thread can submit only between steps; that wait is the engine's and is in TTFT.
    One beside worker processes need not wait.
    """
    intended = requests["intended_s"].to_numpy(float)
    starts, ends = steps["start_s"].to_numpy(float), steps["end_s"].to_numpy(float)
    possible = intended
    if len(starts) and steps["worker"].isna().all():
        running = np.searchsorted(starts, intended, side="right") - 1
        possible = np.maximum(intended, np.where(running >= 0, ends[running], -math.inf))
    lags = np.sort(requests["submitted_s"].to_numpy(float) - possible)
    return nearest_rank(lags, 99) if len(lags) else 0.0


def busy_host(before_percent: float, telemetry: pd.DataFrame, window: Mapping[str, Any], cpus: int) -> list[str]:
    """The host's CPUs in use by others (a hypervisor's other guests included), before the trial and in its window.

    before_percent: of all CPUs, when nothing of the trial ran yet; cpus: how many the host has.
    """
    during_percent = others_percent(_answered(telemetry, window), cpus)
    shares = {"before this trial": before_percent, "during this trial": during_percent}
    busy = [f"{share:.0f} % {when}" for when, share in shares.items() if (share or 0.0) > BUSY_HOST_PERCENT]
    return [f"busy host: of its CPUs others used {', '.join(busy)}"] if busy else []


def others_percent(readings: pd.DataFrame, cpus: int) -> float | None:
    """Mean CPU use of the host less this process's own, in % of all CPUs; None where the samples span too little."""

    def mean(source: str) -> float | None:
        """Weighted by time: a reading is of the time since the one before it."""
        rows = readings[(readings["source"] == source) & (readings["name"] == "cpu_percent")]
        spans = np.diff(rows["t_s"].to_numpy(float))
        if spans.sum() < BUSY_HOST_S:
            return None
        return float(rows["value"].to_numpy(float)[1:] @ spans / spans.sum())

    host, own = mean("host"), mean("process")
    return None if host is None or own is None else max(0.0, host - own / cpus)


def gc_warnings(telemetry: pd.DataFrame, window: Mapping[str, Any]) -> list[str]:
    """Garbage collection in the window: nothing else of the process runs in a pause."""
    readings = _answered(telemetry, window)
    pauses = readings.loc[(readings["source"] == "process") & (readings["name"] == "gc_pause_s"), "value"]
    if not (pauses > GC_PAUSE_S).any():
        return []
    total, most = f"{1000 * pauses.sum():.1f} ms", f"at most {1000 * pauses.max():.1f} ms between two samples"
    return [f"garbage collection: pauses of {total} in a window of {window['end_s'] - window['start_s']:.3g} s, {most}"]


def gpu_warnings(telemetry: pd.DataFrame, window: Mapping[str, Any]) -> list[str]:
    """GPUs that ran slower than they can, or not for this trial alone, in a share of the window's samples.

    A GPU that gives no such reading is not warned of: nothing is known.
    """
    readings = _answered(telemetry, window)
    readings = readings[readings["source"].str.startswith("gpu")]
    found = []
    for gpu, samples in readings[readings["name"] == "throttle_reasons"].groupby("source"):
        bits = slowing(samples["value"].to_numpy(float))
        if bits.any():
            reasons = [f"{reason} {_percent(seen)}" for reason, seen in reasons_of(bits).items()]
            share = f"{_percent(bits != 0)} of {len(bits)} samples"
            found.append(f"GPU clock throttling: {gpu} in {share} ({', '.join(reasons)})")
    for gpu, samples in readings[readings["name"] == "other_processes"].groupby("source"):
        others = samples["value"].to_numpy(float)
        if others.any():
            share = f"{_percent(others > 0)} of {len(others)} samples"
            found.append(f"GPU sharing: other processes on {gpu} in {share}, up to {int(others.max())} at once")
    return found


def slowing(recorded: Floats) -> npt.NDArray[np.int64]:
    """NVML's bits, without those that do not say that a clock is held back."""
    return recorded.astype(np.int64) & ~NO_THROTTLING


def reasons_of(bits: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.bool_]]:
    """Of `slowing`: why clocks were held back, by name (a bit that has none by its number), and in which samples."""
    seen = [1 << i for i in range(int(bits.max(initial=0)).bit_length()) if (bits & (1 << i)).any()]
    return {THROTTLE_REASONS.get(bit, hex(bit)): bits & bit != 0 for bit in seen}


def _answered(telemetry: pd.DataFrame, window: Mapping[str, Any]) -> pd.DataFrame:
    """The window's readings that are not null; none without a window."""
    if window["start_s"] is None or window["end_s"] is None:
        return telemetry.iloc[:0]
    return telemetry[telemetry["value"].notna() & telemetry["t_s"].between(window["start_s"], window["end_s"])]


def _percent(happened: npt.NDArray[np.bool_]) -> str:
    return f"{100 * np.mean(happened):.3g} %"


def _repetition(share: float | None, ignore_eos: bool) -> list[str]:
    seen = "unknown" if share is None else f"{share:.2f}"
    if ignore_eos:
        return [
            f"repetitive output: the end of sequence is ignored (distinct 4-gram share {seen}); flatters speculation"
        ]
    if share is not None and share < REPETITIVE_SHARE:
        return [f"repetitive output: distinct 4-gram share {seen}, below {REPETITIVE_SHARE}; flatters speculation"]
    return []
