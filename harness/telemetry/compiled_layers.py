"""The layers of a compiled model, read off its trace: its operators come in the order of the layers.

Nothing can be wrapped inside of a compiled graph, or it would be compiled anew. But each layer calls the same number of
opaque linear operators, and attention between two of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

LINEAR, ATTEND, FORWARD = "impls::linear", "impls::attend", "forward"

Event = dict[str, Any]


def layer_ranges(trace: Mapping[str, Any], linears_per_layer: int) -> list[Event]:
    """Events as those of `ranges` would be: ``layer N``, in it ``self_attn`` and ``mlp``; of every range ``forward``
    that has linear operators, none where these make no whole layers with attention in each. Times as in the trace, in
    microseconds.

    A layer begins with its first linear operator, so that what fuses its first norm with the layer before lies there,
    and ends where the next one begins; the last one ends with its last operator. The MLP begins with the second linear
    operator after attention, the first being the output projection.
    """
    whole = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    linears, attends = (sorted((e for e in whole if e["name"] == name), key=_start) for name in (LINEAR, ATTEND))
    found: list[Event] = []
    for forward in (e for e in whole if e["name"] == FORWARD and e.get("cat") == "user_annotation"):
        calls, attended = _inside(linears, forward), _inside(attends, forward)
        starts = [_start(call) for call in calls]
        firsts = range(0, len(calls), linears_per_layer)
        outputs = [bisect_left(starts, _start(attend)) for attend in attended]  # the projections behind attention
        if len(calls) % linears_per_layer or len(outputs) != len(firsts):
            continue
        places = [output - first for output, first in zip(outputs, firsts, strict=True)]  # in their layers
        if not all(0 < place < linears_per_layer - 1 for place in places):
            continue  # the trace has lost some of the pass
        bounds = [*starts[::linears_per_layer], _start(calls[-1]) + float(calls[-1]["dur"])] if calls else []
        for layer, output in enumerate(outputs):
            begin, middle, end = bounds[layer], starts[output + 1], bounds[layer + 1]
            parts = ((f"layer {layer}", begin, end), ("self_attn", begin, middle), ("mlp", middle, end))
            found += [_range(forward, name, since, until) for name, since, until in parts]
    return found


def _start(event: Event) -> float:
    return float(event["ts"])


def _inside(ordered: Sequence[Event], outer: Event) -> list[Event]:
    begin, end = _start(outer), _start(outer) + float(outer["dur"])
    first, last = (bisect_left(ordered, at, key=_start) for at in (begin, end))
    return [event for event in ordered[first:last] if (event["pid"], event["tid"]) == (outer["pid"], outer["tid"])]


def _range(forward: Event, name: str, begin: float, end: float) -> Event:
    own = {key: forward[key] for key in ("ph", "cat", "pid", "tid")}
    return {**own, "name": name, "ts": begin, "dur": end - begin}
