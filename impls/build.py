"""Composes an engine from a resolved config. The only place that turns a `_target_` into an object."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

ALLOWED_PREFIXES = ("impls.", "workloads.", "harness.")


def locate(config: Mapping[str, Any]) -> Any:
    """The class that a config names. ValueError if it lies outside the project: a config is data, not code."""
    target = str(config["_target_"])
    if not target.startswith(ALLOWED_PREFIXES):
        raise ValueError(f"_target_={target} must start with one of {', '.join(ALLOWED_PREFIXES)}")
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def construct(config: Mapping[str, Any], **runtime: Any) -> Any:
    """Instantiate an option: its own keys and what only the running engine knows become keyword arguments."""
    options = {key: value for key, value in config.items() if key not in ("name", "_target_")}
    return locate(config)(**options, **runtime)
