"""What the topologies' options have in common."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from impls.seams.topology import Config
from impls.topology.meeting import address_of, key_of


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


def remote_reasons(options: Mapping[str, Any], names: Seq[str]) -> list[str]:
    """Why those of these workers that ``remote`` names cannot dial in from other hosts, where ``listen`` says."""
    remote, listen, reasons = options["remote"], options["listen"], []
    shown = f"topology.remote=[{','.join(map(str, remote))}]"
    if any(name not in names for name in remote):
        return [f"{shown}: must be names among {', '.join(names)}"]
    if len(set(remote)) < len(remote):
        reasons.append(f"{shown}: names a worker twice")
    if remote and listen is None:
        reasons.append(f"{shown}: needs topology.listen=<address>:<port> of this host, where they dial in")
    if listen is not None:
        if not remote:
            reasons.append(f"topology.listen={listen}: nobody is to dial in there (topology.remote=[{names[-1]}])")
        try:
            address_of(listen)
        except ValueError as error:
            reasons.append(f"topology.listen={listen}: {error}")
    if remote:
        try:
            key_of(os.environ)
        except RuntimeError as error:
            reasons.append(f"{shown}: {error}")
    return reasons


def shown_late(batching: Mapping[str, Any]) -> list[str]:
    """Why tokens cannot be held until their batch ends: they are told of with a step, among other workers' steps."""
    if batching.get("emit", "step") == "step":
        return []
    return [f"batching.emit={batching['emit']}: only with topology=colocated"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
