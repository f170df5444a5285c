"""From a Chrome trace of some steps to time by phase and operator group."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GROUPS = (
    *("linear", "head", "attention", "kv_write", "elementwise", "embedding", "sampling", "drafting"),
    "host",  # what no other claims: Python, the scheduler, the batch's tensors
)
LINEAR, HEAD, ATTENTION, KV_WRITE, ELEMENTWISE, EMBEDDING, SAMPLING, DRAFTING, HOST = GROUPS
STEP = "step"  # the range around one step
PHASES = {  # of steps.parquet, and the group of what in them lies in no range of a group
    **dict.fromkeys(("schedule", "swap", "prepare", "forward", "commit"), HOST),
    **{"sample": SAMPLING, "propose": DRAFTING},
}
OPEN = (HOST, ELEMENTWISE, SAMPLING, DRAFTING)  # in which a range may begin another group

# For what runs in no range of a group: operators inside a compiled model, kernels of a CUDA graph. First match counts.
OPERATORS = (
    (re.compile(r"^impls::attend$"), HOST),  # its parts have ranges
    (re.compile(r"^impls\w*::(linear\w*|\w+_mm)$"), LINEAR),
    (re.compile(r"^aten::(linear|matmul|mm|addmm|_int_mm|_scaled_mm|_weight_int[48]pack_mm\w*)$"), LINEAR),
    (re.compile(r"^impls\w*::rows_\w+$|^aten::embedding$"), EMBEDDING),
    (re.compile(r"^Torch-Compiled Region|CompiledFxGraph|^triton_|fused"), ELEMENTWISE),
)
KERNELS = (
    (re.compile(r"attention|merge_splits|flash|fmha", re.I), ATTENTION),
    (re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitk|_mm_", re.I), LINEAR),
    (re.compile(r"linear_kernel|add_splits|(quantize|rescale)_rows"), LINEAR),  # those of `impls.precision`
    (re.compile(r"index_put|scatter", re.I), KV_WRITE),
    (re.compile(r"embedding|index_?select|gather", re.I), EMBEDDING),
    (re.compile(r"elementwise|norm|silu|reduce|triton_|catarray|copy", re.I), ELEMENTWISE),
)
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")

Record = dict[str, str | int | float | None]


@dataclass(frozen=True)
class Place:
    """Where time is booked: in which kind of step, which phase ("" between phases) and which group."""

    kind: str
    phase: str
    group: str


@dataclass
class _Totals:
    calls: int = 0
    cpu_us: float = 0.0
    device_us: float = 0.0


def operator_table(trace: Mapping[str, Any], kinds: Sequence[str | None]) -> list[Record]:
    """{kind, phase, group, calls, cpu_s, device_s} over all steps of a kind; device_s null without a device.

    ``kinds``: of each `STEP` range in order of time; what lies in a step of kind None is left out. cpu_s is time of the
    thread that steps, in no range or operator deeper down, so that it adds up to the length of the steps; it contains
    waiting for a device. device_s is what the kernels took that were launched there. calls: how often it was entered.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    steps = step_ranges(trace)
    if len(steps) != len(kinds):
        raise ValueError(f"the trace has {len(steps)} steps, not {len(kinds)}")
    if not steps:
        return []
    kind_of = {id(event): kind for event, kind in zip(steps, kinds, strict=True)}
    totals: defaultdict[Place, _Totals] = defaultdict(_Totals)
    launched = _walk(events, kind_of, (steps[0]["pid"], steps[0]["tid"]), totals)
    device = [event for event in events if event.get("cat") in DEVICE_WORK]
    for event in device:
        place = launched.get(event.get("args", {}).get("correlation"))
        if place is not None:
            totals[_place_of_kernel(place, str(event["name"]))].device_us += float(event["dur"])
    return [
        {
            **{"kind": place.kind, "phase": place.phase, "group": place.group, "calls": found.calls},
            **{"cpu_s": found.cpu_us / 1e6, "device_s": found.device_us / 1e6 if device else None},
        }
        for place, found in sorted(totals.items(), key=lambda item: _order(item[0]))
    ]


def step_ranges(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trace's own events, in order of time."""
    return sorted((e for e in trace["traceEvents"] if _is_range(e, STEP)), key=lambda event: float(event["ts"]))


def _walk(
    events: Sequence[Mapping[str, Any]],
    kind_of: Mapping[int, str | None],
    thread: tuple[Any, Any],
    totals: defaultdict[Place, _Totals],
) -> dict[Any, Place]:
    """Books the thread's time by nesting; gives the place of each launch by its correlation id."""
    there = [e for e in events if (e["pid"], e["tid"]) == thread and e.get("cat") in ("cpu_op", "user_annotation")]
    calls = [e for e in events if (e["pid"], e["tid"]) == thread and e.get("cat") in LAUNCHES]
    launched: dict[Any, Place] = {}
    stack: list[tuple[float, Place | None]] = []
    for event in sorted([*there, *calls], key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        start, length = float(event["ts"]), float(event["dur"])
        while stack and stack[-1][0] <= start:
            stack.pop()
        outer = stack[-1][1] if stack else None
        if event.get("cat") in LAUNCHES:
            if outer is not None:
                launched[event.get("args", {}).get("correlation")] = outer
            continue
        if id(event) in kind_of:
            kind = kind_of[id(event)]
            place = None if kind is None else Place(kind, "", HOST)
        elif outer is None:
            place = None  # before, between or beside the steps
        else:
            place = _place(outer, event)
        if place is not None:
            totals[place].cpu_us += length
            totals[place].calls += outer is None or place != outer or _is_range(event, place.group)
            if outer is not None:
                totals[outer].cpu_us -= length
        stack.append((start + length, place))
    return launched


def _place(outer: Place, event: Mapping[str, Any]) -> Place:
    name = str(event["name"])
    if event.get("cat") == "user_annotation":
        if name in PHASES and not outer.phase:
            return Place(outer.kind, name, PHASES[name])
        group = name.partition(":")[0]
        if group in GROUPS and outer.group in OPEN:
            return Place(outer.kind, outer.phase, group)
    if outer.phase in ("forward", "propose") and outer.group in OPEN:
        for pattern, group in OPERATORS:
            if pattern.search(name):
                return Place(outer.kind, outer.phase, group)
    return outer


def _place_of_kernel(place: Place, name: str) -> Place:
    if (place.phase, place.group) == ("forward", HOST):
        for pattern, group in KERNELS:
            if pattern.search(name):
                return Place(place.kind, place.phase, group)
    return place


def _is_range(event: Mapping[str, Any], name: str) -> bool:
    """Whether it is one that `record_function` opened; what lies behind a colon is a detail."""
    return event.get("cat") == "user_annotation" and str(event["name"]).partition(":")[0] == name


def _order(place: Place) -> tuple[str, int, int]:
    """Prefill after decode, phases in their order in a step, groups in that of `GROUPS`."""
    return place.kind, ["", *PHASES].index(place.phase), GROUPS.index(place.group)
