"""The JSON documents of a record: strict, written whole or not at all, and refused in one line that names the file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import pandas as pd

from harness.texts import one_line

SCHEMA_VERSION = 1


class RecordError(ValueError):
    """A record that cannot be written or read: one line that names the file."""


class NewerRecordError(RecordError):
    """A record of a schema that is newer than this version reads."""


def said(error: BaseException) -> str:
    """What an error says of itself, for the line that names the file."""
    return one_line(str(error))[:200] or type(error).__name__


def encode(value: Any) -> Any:
    """Plain JSON data: NaN becomes None, infinities "inf" and "-inf", numpy scalars and paths their plain kin."""
    if value is None or isinstance(value, str | bool) or value is pd.NA:
        return None if value is pd.NA else value
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [encode(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isnan(number):
            return None
        return ("inf" if number > 0 else "-inf") if math.isinf(number) else number
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy arrays, and its bool, which is no Integral
        return encode(value.tolist())
    raise RecordError(f"a record cannot hold {type(value).__name__} {value!r}")


def decode_numbers(value: Any) -> Any:
    """Undo `encode` where every string "inf" is a number, as in metrics; not for configs, whose strings are strings."""
    if isinstance(value, dict):
        return {key: decode_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and value in ("inf", "-inf") else value


def write_json(path: Path, value: Any) -> None:
    """Strict JSON through a temporary name: the file is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(encode(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """RecordError if it is missing, no strict JSON, no object, or of a newer schema version."""
    try:
        loaded = json.loads(path.read_text("utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise RecordError(f"{path}: not found") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not readable as JSON ({said(error)})") from error
    if not isinstance(loaded, dict):
        raise RecordError(f"{path}: holds {type(loaded).__name__}, not an object")
    version = loaded.get("schema_version", SCHEMA_VERSION)
    if type(version) is not int or version < 1:
        raise RecordError(f"{path}: schema_version {version!r} is not a version number")
    if version > SCHEMA_VERSION:
        newer = f"schema_version {version} is newer than {SCHEMA_VERSION}, which this version reads"
        raise NewerRecordError(f"{path}: {newer}")
    return loaded


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not strict JSON")
