"""From a plain config mapping to a law: one dataclass per law, built strictly, so that no key is silently ignored."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import MISSING, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from workloads.errors import WorkloadError, one_of

T = TypeVar("T")

# What any sub-config may say about itself: `name` is the conf option, `law` the class where they differ, `source` where
# the numbers come from.
METADATA = ("name", "law", "source")


class OptionError(ValueError):
    """A law's own complaint about one field; `build` adds the path that the user typed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value}: must be {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    if not condition:
        raise OptionError(field, value, allowed)


def build_law(path: str, laws: Mapping[str, type[T]], config: Mapping[str, Any]) -> T:
    """The law that ``config`` names by `law` (or else `name`), from ``laws``. ``path``: e.g. workload.arrivals."""
    if not isinstance(config, Mapping):
        raise WorkloadError(f"{path}={config}: must be a mapping with a name, {one_of(laws, str(config))}")
    law = str(config.get("law") or config.get("name"))
    if law not in laws:
        raise WorkloadError(f"{path}={law}: must be {one_of(laws, law)}")
    return build_options(path, laws[law], {key: value for key, value in config.items() if key not in METADATA}, law)


def build_options(path: str, cls: type[T], config: Mapping[str, Any], owner: str) -> T:
    """An instance of the dataclass ``cls``. WorkloadError for an unknown or missing key, a wrong type or value."""
    hints = get_type_hints(cls)
    names = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    for key in config:
        if key not in names:
            raise WorkloadError(
                f"{path}.{key}={config[key]}: not an option of {owner}, must be {one_of(names, str(key))}"
            )
    for item in fields(cls):  # type: ignore[arg-type]
        if item.name not in config and item.default is MISSING and item.default_factory is MISSING:
            raise WorkloadError(f"{path}.{item.name} is missing: {owner} needs it")
    try:
        return cls(**{str(key): _coerce(hints[key], str(key), value) for key, value in config.items()})
    except OptionError as error:
        raise WorkloadError(f"{path}.{error.field}={error.value}: must be {error.allowed}") from error


def _coerce(hint: Any, field: str, value: Any) -> Any:
    """``value`` as ``hint`` (bool, int, float, str, tuple[x, ...], tuple[x, y], x | None), or OptionError."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _coerce(next(arg for arg in get_args(hint) if arg is not type(None)), field, value)
    if origin is tuple:
        parts = get_args(hint)
        if not isinstance(value, Seq) or isinstance(value, str):
            raise OptionError(field, value, "a list")
        if parts[-1] is Ellipsis:
            return tuple(_coerce(parts[0], field, part) for part in value)
        require(len(value) == len(parts), field, value, f"a list of lists of {len(parts)}")
        return tuple(_coerce(part_hint, field, part) for part_hint, part in zip(parts, value, strict=True))
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        require(number and float(value).is_integer(), field, value, "a whole number")
        return int(value)
    if hint is float:
        require(number, field, value, "a finite number")
        return float(value)
    require(isinstance(value, hint), field, value, f"of type {hint.__name__}")
    return value
