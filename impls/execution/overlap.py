"""With which options of the other axes a step can be prepared while the one before it runs (`impls.step_queue`)."""

from __future__ import annotations

from typing import Any

from impls.seams import Arm

OVERLAP = ("off", "on")
WAITING = ("sdpa", "reference")  # attention that reads block tables on the host


def overlap_reasons(arm: Arm, overlap: Any) -> list[str]:
    """Why steps of this arm cannot overlap."""
    if overlap not in OVERLAP:
        return [f"execution.overlap={overlap}: must be on or off"]
    if overlap == "off":
        return []
    reasons = []
    if arm.axes.get("batching", {}).get("name") == "static":
        reasons.append(
            "overlap needs batching=continuous or chunked_prefill: which rows of a static batch are dead is known only "
            "when the step before has yielded its tokens"
        )
    if arm.axes.get("decoding", {}).get("name") != "autoregressive":
        reasons.append(
            "overlap needs decoding=autoregressive: drafts follow the tokens that the step before has yet to yield"
        )
    attention = arm.axes.get("attention", {}).get("name")
    if arm.device == "cuda" and attention in WAITING:
        reasons.append(f"overlap needs attention=triton on CUDA: attention={attention} waits there for the step before")
    return reasons
