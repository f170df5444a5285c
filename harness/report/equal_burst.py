"""Prefill and decode tok/s, where traffic tells them apart: a burst of equal requests, all prefilled in one step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from harness.records import TrialRecord

EQUAL = ("intended_s", "prompt_tokens", "output_tokens")


def phase_rates(trial: TrialRecord) -> tuple[float, float] | None:
    """(prompt tokens / TTFT, requests / ITL), both p50; None of any other traffic.

    The step that prefills them all gives every request its first token, and each later one gives every request one.
    """
    requests = trial.table("requests", EQUAL)
    prompt_tokens = sum(requests["prompt_tokens"].to_pylist())
    prefilled = [tokens for tokens in trial.table("steps", ("prefill_tokens",))[0].to_pylist() if tokens]
    if prefilled != [prompt_tokens] or any(len(set(requests[name].to_pylist())) != 1 for name in EQUAL):
        return None
    ttft, itl = ((trial.run["metrics"].get(name) or {}).get("p50") for name in ("ttft_s", "itl_s"))
    return (prompt_tokens / ttft, requests.num_rows / itl) if ttft and itl else None


def median_rates(trials: Sequence[TrialRecord]) -> tuple[float | None, float | None]:
    """Of the trials of an arm that have them."""
    found = [rates for rates in map(phase_rates, trials) if rates is not None]
    if not found:
        return None, None
    prefill, decode = zip(*found, strict=True)
    return median(prefill), median(decode)
