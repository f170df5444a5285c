"""With which options of the other axes sequences can share blocks at all."""

from __future__ import annotations

from impls.seams import Arm


def sharing_reasons(arm: Arm) -> list[str]:
    """Why no sequence of this arm could use what another one has written."""
    reasons = []
    kv_cache, batching = arm.axes.get("kv_cache", {}), arm.axes.get("batching", {})
    if kv_cache.get("name") != "paged":
        reasons.append(
            f"needs kv_cache=paged: kv_cache={kv_cache.get('name')} holds a sequence in one piece, no part of which "
            "another could share"
        )
    if batching.get("name") == "static":
        reasons.append(
            "batching=static computes every prompt of a batch from its first position on, and its dead rows write to "
            "blocks that others would share"
        )
    return reasons
