"""The layers of a compiled model, found in its trace by the order of its operators."""

from __future__ import annotations

from typing import Any

import pytest

from harness.telemetry.compiled_layers import layer_ranges


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def layer(start: float) -> list[dict[str, Any]]:
    """qkv, attention, output projection, gate and up, down."""
    operators = ("impls::linear", "impls::attend", "impls::linear", "impls::linear", "impls::linear")
    return [event(name, start + 10 * i, 8) for i, name in enumerate(operators)]


def test_layers_begin_with_their_first_product_and_the_mlp_with_the_second_after_attention() -> None:
    forward = event("forward", 0, 200, "user_annotation")
    beside = event("impls::linear", 20, 5, tid=2)  # of another thread
    head = event("impls::linear", 250, 5)  # after the pass
    found = layer_ranges({"traceEvents": [head, *layer(60), beside, forward, *layer(10)]}, 4)
    assert [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in found] == [
        *(("layer 0", 10, 60), ("self_attn", 10, 40), ("mlp", 40, 60)),
        *(("layer 1", 60, 108), ("self_attn", 60, 90), ("mlp", 90, 108)),
    ]
    assert all((e["ph"], e["cat"], e["pid"], e["tid"]) == ("X", "user_annotation", 1, 1) for e in found)


def test_every_pass_counts_anew_and_one_without_whole_layers_has_none() -> None:
    passes = [event("forward", 100 * i, 90, "user_annotation") for i in range(3)]
    events = [*passes, *layer(10), *layer(110)[:-1], *layer(210)]
    found = layer_ranges({"traceEvents": events}, 4)
    assert [(e["name"], e["ts"]) for e in found if e["name"].startswith("layer")] == [("layer 0", 10), ("layer 0", 210)]


@pytest.mark.parametrize(
    "kept",
    [
        (1, 5, 7, 8, 9),  # attention before any product
        (0, 2, 3, 4, 6),  # behind all
        (0, 2, 3, 6, 7),  # behind all but one
    ],
)
def test_a_trace_that_lost_events_has_no_layers_rather_than_wrong_ones(kept: tuple[int, ...]) -> None:
    """As many operators as one layer has are left of two."""
    operators = [*layer(10), *layer(60)]
    forward = event("forward", 0, 200, "user_annotation")
    assert layer_ranges({"traceEvents": [forward, *(operators[i] for i in kept)]}, 4) == []


def test_an_eager_pass_has_no_such_operator() -> None:
    trace = {"traceEvents": [event("forward", 0, 50, "user_annotation"), event("aten::linear", 10, 5)]}
    assert layer_ranges(trace, 4) == []
