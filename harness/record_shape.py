"""What is read of run.json and study.json, as data, and the check of a document against it.

A shape is a type (`object`: anything; `float` takes whole numbers too, a bool is none), a union with None, `NUMBERS`
(a number or null, or objects and lists of such), a list of one shape, an object whose named fields may be absent or
null (`...`: all others, which may not), or a `Whole` object. What no shape names is read by nobody, or as a text.
"""

from __future__ import annotations

import sys
from types import UnionType
from typing import Any, get_args

from harness.record_json import RecordError

NUMBERS = object()
NUMBER = float | None
TEXTS, OBJECT, OF_NUMBERS = [str], dict[Any, Any](), {...: NUMBER}


class Whole(dict[Any, Any]):
    """Of an object that has all of these fields; null only where the field's shape is a union with None."""


GROUPS = (  # of conf/, as far as they have options
    *("model", "device", "batching", "kv_cache", "prefix", "kv_dtype", "decoding", "proposer", "precision"),
    *("attention", "execution", "topology", "target", "workload", "telemetry", "slo", "price", "study"),
)
CONFIG = {
    **dict.fromkeys(GROUPS, OBJECT),
    "batching": {"max_num_seqs": int},
    "kv_cache": {"block_size": int},
    "slo": {"name": str, ...: NUMBER},
}
METRICS: dict[Any, Any] = {
    **dict.fromkeys(("ttft_s", "itl_s", "speculation"), OF_NUMBERS),
    **dict.fromkeys(("output_tokens_per_s", "n_finished", "n_failed", "n_rejected", "startup_s"), float),
    "equivalence": float | str,  # a word in older records
    ...: NUMBERS,
}
PROVENANCE = {
    **dict.fromkeys(("hardware", "git", "versions", "model", "kernels"), OBJECT),
    **{"host_before": {"load_1m": float}, "host_after": {"load_1m": float}, "workload": {"text": OBJECT}},
    "telemetry_cost": Whole(dict.fromkeys(("rounds", "cpu_s", "mean_round_s", "max_round_s"), float)),
}
LIMITS = {"source": str, "flops_per_s": float, "bytes_per_s": float, ...: NUMBERS}
BY_KIND = ("prefill", "decode")
PROFILE = Whole(
    steps=Whole(dict.fromkeys(BY_KIND, int)),
    window_s=Whole(dict.fromkeys(BY_KIND, NUMBER)),
    operators=[Whole(kind=str, phase=str, group=str, cpu_s=float, device_s=NUMBER)],
)
STAGES = Whole(rows=int, **dict.fromkeys(("apply_s", "quantize_s", "matmul_s", "rescale_s"), NUMBER))
QUALITY = {
    "texts": float,
    **dict.fromkeys(("perplexity", "kl_vs_bf16", "top1_agreement"), Whole(low=NUMBER, high=NUMBER)),
}
AGREEMENT = Whole(
    **dict.fromkeys(("requests", "identical", "common_tokens", "tokens"), float),
    divergences=[{"gap": float}],
)
RUN = Whole(
    **{"schema_version": int, "study": str, "arm": str, "trial": int, "status": str, "reasons": TEXTS},
    **{"config": CONFIG, "axes": {...: str}, "seed": int, "provenance": PROVENANCE},
    **{"window": {"rule": str, ...: NUMBER}, "metrics": METRICS, "limits": LIMITS},
    **{"validity": TEXTS, "clock": str, "emulated": [object]},
)
# Beyond the contract, absent or null where it was not measured. decode_costs: of `warm_up.WarmUp`. linear_stages: what
# `linear_stages.linear_stage_times` gave. profile: of `telemetry.profiler.Profile`. quality: of
# `quality.measure_quality`. equivalence: of `equivalence.check_study`.
RUN_EXTRA = {
    **{"decode_costs": [OBJECT], "linear_stages": [STAGES], "profile": PROFILE, "quality": QUALITY},
    "equivalence": AGREEMENT,
}
ARM = {"overrides": TEXTS, "versus": str, "reasons": TEXTS, "config": CONFIG, "fingerprints": OBJECT}
PLAN = Whole(arms={...: ARM})
PLAN_EXTRA = {
    **dict.fromkeys(("study", "command", "baseline", "created"), str),
    **dict.fromkeys(("trials", "half_width"), float),
}
RESUMED_PLAN = Whole(  # what a study that goes on needs beside that
    **dict.fromkeys(("study", "command", "baseline", "isolation"), str),
    **{"overrides": TEXTS, "seed": int, "stall_s": float, "order": [[str]]},
    arms={
        ...: Whole(
            **{"overrides": TEXTS, "versus": str | None, "trials": int, "reasons": TEXTS},
            config=Whole(kv_cache=Whole(budget_bytes=int), device=Whole(name=str)),
        )
    },
)


def check_run(run: Any, path: object) -> None:
    """RecordError unless all that is read of run.json, its infinities numbers again, is of the kind that it must be."""
    for shape in (RUN, RUN_EXTRA):
        check(run, shape, path)


def check_plan(plan: Any, path: object, resumed: bool = False) -> None:
    """RecordError unless all that is read of study.json is of the kind that it must be."""
    for shape in (PLAN, PLAN_EXTRA, *([RESUMED_PLAN] if resumed else [])):
        check(plan, shape, path)


def check(value: Any, shape: Any, path: object, place: str = "") -> None:
    """RecordError, naming ``path`` and ``place``, for the first part of ``value`` that is not as ``shape`` has it."""
    if _plainly(value, shape):
        return
    kind: Any = dict if isinstance(shape, dict) else list if isinstance(shape, list) else shape
    if shape is NUMBERS:
        kind = type(value) if isinstance(value, dict | list) else NUMBER
    if not any(_is(value, each) for each in (get_args(kind) if isinstance(kind, UnionType) else [kind])):
        expected = {NUMBER: "a number or null", float: "a number"}.get(kind) or getattr(kind, "__name__", kind)
        raise RecordError(f"{path}: {place} is {type(value).__name__}, expected {expected}")
    if kind in (float, NUMBER) and isinstance(value, int) and abs(value) > sys.float_info.max:
        raise RecordError(f"{path}: {place} is beyond what a float holds")
    if isinstance(shape, Whole) and (absent := [name for name in shape if name not in value]):
        raise RecordError(f"{path}: {f'{place} is ' if place else ''}missing {', '.join(absent)}")
    if kind is dict:
        for name, item in value.items():
            inner = shape if shape is NUMBERS else shape.get(name, shape.get(..., object))
            may_be_null = shape is not NUMBERS and name in shape and not isinstance(shape, Whole)
            if not (_plainly(item, inner) or (item is None and may_be_null)):
                check(item, inner, path, f"{place}.{name}" if place else str(name))
    elif kind is list:
        for index, item in enumerate(value):
            check(item, shape if shape is NUMBERS else shape[0], path, f"{place}[{index}]")


def _plainly(value: Any, shape: Any) -> bool:
    """Whether it is, at a glance: most of a record is, and a report reads hundreds of thousands of values."""
    kind = type(value)
    return kind is shape or shape is object or (kind is float and (shape is NUMBER or shape is NUMBERS))


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is object
    return isinstance(value, float | int if kind is float else kind)
