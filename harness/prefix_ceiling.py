"""What a trial's prefix hits are to be read against: the size of its cache, and what one without limit would serve."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.records import TrialRecord
from harness.window import Window

COLUMNS = ("intended_s", "finish_reason", "prompt_tokens", "planned_cached_tokens", "request_id")
FURTHER_SAMPLE = re.compile(r"#[1-9]\d*$")  # `Request.samples`


def prefix_context(trial: TrialRecord) -> dict[str, float]:
    """Metrics of a trial whose traffic repeats itself: `kv_capacity_tokens` and `prefix_hit_rate_ceiling`; else none.

    The ceiling is of all prompt tokens: what an earlier request of the window has at its start too, in whole blocks and
    leaving one token to compute, as this engine's caches count; further samples of a prompt copy its last block too.
    """
    if not trial.run["metrics"].get("prefix_hit_rate_planned"):
        return {}
    capacity = [tokens for tokens in trial.table("steps", ("kv_capacity_tokens",))[0].to_pylist() if tokens]
    table = trial.table("requests", COLUMNS)
    intended, prompt, planned = (np.array(table[name].to_pylist(), float) for name in (COLUMNS[0], *COLUMNS[2:4]))
    window = Window(*(trial.run["window"].get(name) for name in ("rule", "start_s", "end_s")))
    counted = window.holds(intended) if window.rule == "timed" else np.ones(len(intended), bool)
    counted &= np.array(table["finish_reason"].to_pylist(), object) != "rejected"
    copies = np.array([FURTHER_SAMPLE.search(name) is not None for name in table["request_id"].to_pylist()], bool)
    unit = np.where(copies, 1, block_size(trial.run["config"]))
    served = np.minimum(planned, prompt - 1) // unit * unit
    total = float(prompt[counted].sum())
    found = {"prefix_hit_rate_ceiling": float(served[counted].sum()) / total} if total else {}
    return found | ({"kv_capacity_tokens": float(max(capacity))} if capacity else {})


def block_size(config: Mapping[str, Any]) -> int:
    """Of the cache: positions that are shared or not as one."""
    return int((config.get("kv_cache") or {}).get("block_size") or 1)
