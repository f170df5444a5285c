"""Values that a configuration may hold: the types that an option's class declares, and the bounds of the numbers."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from harness.errors import BadInput, not_allowed, unknown_key
from harness.texts import one_line

# As `impls.build.ALLOWED_PREFIXES`, whose import would load torch before a mistake in the command is told.
ALLOWED_TARGETS = ("impls.", "workloads.", "harness.")
# Every number is finite and at least 0. These names are narrower, wherever they occur.
AT_LEAST_ONE = {
    *("trials", "max_trials", "num_requests", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len"),
    *("concurrency", "num_draft_tokens", "num_groups", "max_tokens", "num_layers", "threads", "profiler_steps"),
}
ABOVE_ZERO = {"rate", "rate_hz", "stall_s", "time_scale", "cv", "half_width"}
AT_MOST_ONE = {"share", "top_p", "acceptance_rate", "profiler_at"}
# Every block is planned, and written down, before the first; a step of a trace takes about a megabyte of memory; who
# reads counters all the time is measured himself.
AT_MOST = {"trials": 10_000, "max_trials": 10_000, "profiler_steps": 256, "rate_hz": 1000}
ANY_SIGN = {"mu"}  # the log of a median below 1 is negative
NUMBERS = AT_LEAST_ONE | ABOVE_ZERO | AT_MOST_ONE | {"per_hour"}  # or null, whatever conf/ says
CHOICES = {"isolation": ("process", "inline"), "telemetry.profiler": ("none", "torch")}
# Read by the harness before an option is constructed, so no constructor knows them.
HARNESS_KEYS = {"kv_cache": ("budget",)}


def check_targets(config: Mapping[str, Any]) -> None:
    """Every `_target_` lies inside the project: a configuration is data, not code."""
    for path, node in _option_nodes(config):
        if not str(node["_target_"]).startswith(ALLOWED_TARGETS):
            raise not_allowed(f"{path}._target_", str(node["_target_"]), ALLOWED_TARGETS, "must start with one of")


def check_value(key: str, value: Any, default: Any = None) -> None:
    """An overridden value, mappings and lists included. ``default`` (of conf/) tells its type where it is not null."""
    if key in CHOICES and value not in CHOICES[key]:
        raise not_allowed(key, _shown(value), CHOICES[key])
    if key.rpartition(".")[2] in NUMBERS and (isinstance(value, str | bool)):
        raise BadInput(f"{key}={_shown(value)}: must be a number; for example {_shown(default or 1)}")
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_value(f"{key}.{name}", item, default.get(name) if isinstance(default, Mapping) else None)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            check_value(key, item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_number(key, value)
    if default is not None and value is not None and not _same_kind(value, default):
        raise BadInput(f"{key}={_shown(value)}: must be {_kind(default)}; for example {_shown(default)}")


def check_values(config: Mapping[str, Any]) -> None:
    """Every option's values against what its class declares."""
    for path, node in _option_nodes(config):
        module, _, name = str(node["_target_"]).rpartition(".")
        try:
            declared = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise BadInput(f"{path}._target_={node['_target_']}: {one_line(str(error))}") from error
        signature = inspect.signature(declared)
        hints = typing.get_type_hints(declared.__init__ if inspect.isclass(declared) else declared)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        for key, value in node.items():
            if key in ("name", "_target_", *HARNESS_KEYS.get(path, ())):
                continue
            if key not in signature.parameters and not takes_any:
                raise unknown_key(f"{path}.{key}", [*signature.parameters])
            if key in hints and not _holds(value, hints[key]):
                raise BadInput(f"{path}.{key}={_shown(value)}: must be {_said(hints[key])}")


def _option_nodes(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            here = f"{path}.{key}" if path else str(key)
            if "_target_" in value:
                yield here, value
            yield from _option_nodes(value, here)


def _check_number(key: str, value: float) -> None:
    name = key.rpartition(".")[2]
    if not math.isfinite(value):
        raise BadInput(f"{key}={value}: must be a finite number")
    if name in AT_LEAST_ONE and value < 1:
        raise BadInput(f"{key}={value}: must be at least 1; nearest: 1")
    if name in ABOVE_ZERO and value <= 0:
        raise BadInput(f"{key}={value}: must be above 0; for example 1")
    if name in AT_MOST_ONE and value > 1:
        raise BadInput(f"{key}={value}: must lie within 0 and 1; nearest: 1")
    if name in AT_MOST and value > AT_MOST[name]:
        raise BadInput(f"{key}={value}: must be at most {AT_MOST[name]}; nearest: {AT_MOST[name]}")
    if value < 0 and name not in ANY_SIGN:
        raise BadInput(f"{key}={value}: must not be negative; nearest: 0")


def _same_kind(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, int):
        return isinstance(value, int)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    if isinstance(default, str):
        return isinstance(value, (str, int, float))  # `budget: 0.25` or `3072tokens`: its reader parses it
    return isinstance(value, Mapping) == isinstance(default, Mapping)


def _kind(default: Any) -> str:
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, int):
        return "a whole number"
    if isinstance(default, float):
        return "a number"
    if isinstance(default, str):
        return "a text"
    return "a mapping" if isinstance(default, Mapping) else "a list"


def _holds(value: Any, hint: Any) -> bool:
    """Does a plain value fit an annotation? Annotations that say nothing about plain values accept everything."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_holds(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if hint is None or hint is type(None):
        return value is None
    if hint is bool or hint is str:
        return isinstance(value, hint)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    container = origin or hint
    if inspect.isclass(container) and issubclass(container, Mapping):
        return isinstance(value, Mapping)
    if inspect.isclass(container) and issubclass(container, Sequence):
        items = [a for a in arguments if a is not Ellipsis]
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        return listed and (len(items) != 1 or all(_holds(item, items[0]) for item in value))
    return True


def _said(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_said(option) for option in arguments)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in arguments)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    if hint in names:
        return names[hint]
    return "a mapping" if inspect.isclass(origin or hint) and issubclass(origin or hint, Mapping) else "a list"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else one_line(str(value))
