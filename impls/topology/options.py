"""What the topologies' options have in common."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from impls.seams.topology import Config


def worker_config(
    config: Config,
    *,
    share: float,
    threads: int | None,
    batching: Config | None = None,
    max_num_seqs: int | None = None,
) -> dict[str, Any]:
    """The arm's config for one worker: ``share`` of the KV budget, threads, a batching policy (None: the arm's)."""
    own = copy.deepcopy(dict(config))
    own["topology"] = {"name": "colocated"}
    own["kv_cache"] = {**own["kv_cache"], "budget_bytes": int(own["kv_cache"]["budget_bytes"] * share)}
    if threads is not None:
        own["device"] = {**own["device"], "threads": threads}
    if batching is not None:
        own["batching"] = dict(batching)
    if max_num_seqs is not None:
        own["batching"] = {**own["batching"], "max_num_seqs": max_num_seqs}
    return own


def count_reasons(path: str, options: Mapping[str, Any]) -> list[str]:
    """Why so many workers, or threads of each, cannot be."""
    reasons = []
    workers, threads = options["workers"], options["threads"]
    if not _is_count(workers):
        reasons.append(f"{path}.workers={workers}: must be a whole number of at least 1")
    if threads is not None and not _is_count(threads):
        reasons.append(f"{path}.threads={threads}: must be null or a whole number of at least 1")
    return reasons


def shown_late(batching: Mapping[str, Any]) -> list[str]:
    """Why tokens cannot be held until their batch ends: they are told of with a step, among other workers' steps."""
    if batching.get("emit", "step") == "step":
        return []
    return [f"batching.emit={batching['emit']}: only with topology=colocated"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
