"""Reads recorded traffic: JSONL (`FIELDS`, which cover Mooncake's traces) or Azure's CSV, .gz or not."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.random import Generator

from workloads.errors import WorkloadError, one_of
from workloads.lengths import MAX_TOKENS

HASH_BLOCK_TOKENS = 512  # one entry of hash_ids stands for so many prompt tokens (Mooncake)
# Of a line, and of all requests: a line's characters and the prompt tokens that it asks for, all built before a run.
MAX_LINE_CHARS, MAX_TRACE_SIZE = 1 << 25, 1 << 28
SURROGATE = re.compile("[\ud800-\udfff]")
SHOWN_CHARS = 40  # of a value in an error
AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,9})?", re.ASCII)
AZURE_COUNT = re.compile(r"\d{1,19}", re.ASCII)
FIELDS = (
    "timestamp", "arrival_s", "prompt", "prompt_token_ids", "input_length", "output_length", "max_tokens", "hash_ids",
    "seed", "temperature", "ignore_eos", "stop_token_ids", "session_id", "priority",
)  # fmt: skip


@dataclass(frozen=True)
class TraceRow:
    """One recorded request. Exactly one of ``prompt``, ``prompt_token_ids`` and ``input_length`` says what its prompt
    is (``hash_ids`` may refine a length); ``arrival_s`` None: the file gives no times; other None: not recorded.
    ``priority``: lower runs first under ``batching.order=priority``.
    """

    line: int
    max_tokens: int
    arrival_s: float | None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    input_length: int | None = None
    hash_ids: tuple[int, ...] | None = None
    seed: int | None = None
    temperature: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    session_id: str | None = None
    priority: int = 0


def read_trace(path: Path, *, limit: int | None, skip_head: int) -> list[TraceRow]:
    """Rows ``skip_head``.. of the file, at most ``limit``, by arrival (a stable sort), the first at 0 s.

    Raises WorkloadError, with the line number, for the first row that cannot be replayed, and for more rows than fit.
    """
    rows, held = [], 0
    for row, chars in islice(_rows(path), skip_head, None if limit is None else skip_head + limit):
        rows.append(row)
        held += chars + (row.input_length or 0)
        if held > MAX_TRACE_SIZE:
            raise WorkloadError(
                f"workload.limit={limit or 'null'}: must be below {len(rows)}: so many requests of {path} have more "
                f"than {MAX_TRACE_SIZE} characters and prompt tokens"
            )
    if not rows:
        raise WorkloadError(f"workload.path={path}: must hold a request after skip_head={skip_head}, has none")
    timed = [row for row in rows if row.arrival_s is not None]
    if timed and len(timed) < len(rows):
        line = next(row.line for row in rows if row.arrival_s is None)
        raise WorkloadError(
            f"{path}, line {line}: has no timestamp, but line {timed[0].line} has one; give all or none"
        )
    start = min((row.arrival_s or 0.0) for row in rows)
    shifted = [row if row.arrival_s is None else replace(row, arrival_s=row.arrival_s - start) for row in rows]
    return sorted(shifted, key=lambda row: row.arrival_s or 0.0)


def trace_fingerprint(path: Path) -> str:
    """SHA-256 of the file, 12 digits: a path says nothing of what lies there the next time. WorkloadError as above."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise _unreadable(path, error) from error


def dequantise(rows: list[TraceRow], tick_s: float, rng: Generator) -> list[TraceRow]:
    """Requests that share a timestamp spread uniformly over the ``tick_s`` that follows it (a clock's resolution).

    A timestamp that only one request has is moved as well: on a grid it is just as coarse.
    """
    offsets = rng.random(len(rows)) * tick_s
    spread = [replace(row, arrival_s=(row.arrival_s or 0.0) + float(o)) for row, o in zip(rows, offsets, strict=True)]
    return sorted(spread, key=lambda row: row.arrival_s or 0.0)


def _rows(path: Path) -> Iterator[tuple[TraceRow, int]]:
    """Each row with the length of its line."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as lines:
            azure = False
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_CHARS), ""), start=1):
                text = line.strip()
                if not text:
                    continue
                try:
                    if number == 1 and text.split(",") == AZURE_HEADER:
                        azure = True
                    else:
                        yield _azure_row(number, text) if azure else _json_row(number, text), len(line)
                except ValueError as error:
                    # A value that is shown may hold line breaks.
                    raise WorkloadError(f"{path}, line {number}: {' '.join(str(error).split())}") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> WorkloadError:
    reason = getattr(error, "strerror", None) or str(error)
    return WorkloadError(
        f"workload.path={path}: must be a readable JSONL or Azure CSV file (UTF-8, .gz or not): {reason}"
    )


def _azure_row(line: int, text: str) -> TraceRow:
    parts = text.split(",")
    if len(parts) != 3:
        raise ValueError(f"must have the 3 columns {','.join(AZURE_HEADER)}, has {len(parts)}")
    time = AZURE_TIME.fullmatch(parts[0])
    try:
        if time is None:
            raise ValueError("has another form")
        whole = datetime.fromisoformat(time[1])
    except ValueError as error:
        raise ValueError(f"TIMESTAMP={_shown(parts[0])}: must be like 2023-11-16 18:15:46.6805900") from error
    # The fraction by itself: its seven digits are more than datetime holds.
    seconds = (whole - datetime(2000, 1, 1)).total_seconds() + float(time[2] or 0)
    numbers = {}
    for name, value in zip(AZURE_HEADER[1:], parts[1:], strict=True):
        numbers[name] = _tokens(name, int(value) if AZURE_COUNT.fullmatch(value) else value)
    return TraceRow(line, numbers["GeneratedTokens"], seconds, input_length=numbers["ContextTokens"])


def _json_row(line: int, text: str) -> TraceRow:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be one JSON object ({error})") from error
    if not isinstance(row, dict):
        raise ValueError("must be one JSON object")
    for key in row:
        if key not in FIELDS:
            raise ValueError(f"{_shown(key)}: not a field, must be {one_of(FIELDS, _shown(key))}")
    _at_most_one(row, "timestamp", "arrival_s")
    _at_most_one(row, "output_length", "max_tokens")
    prompts = _at_most_one(row, "prompt", "prompt_token_ids", "input_length")
    if prompts is None and row.get("hash_ids") is None:
        raise ValueError("must have one of prompt, prompt_token_ids, input_length, hash_ids")
    output = _at_most_one(row, "output_length", "max_tokens")
    if output is None:
        raise ValueError("must have output_length or max_tokens")
    hash_ids = _ids(row, "hash_ids")
    input_length = None if row.get("input_length") is None else _tokens("input_length", row["input_length"])
    if hash_ids is not None:
        if prompts not in (None, "input_length"):
            raise ValueError(f"hash_ids with {prompts}: must be one of them")
        input_length = input_length or _tokens("512 x hash_ids", len(hash_ids) * HASH_BLOCK_TOKENS)
        blocks = -(-input_length // HASH_BLOCK_TOKENS)
        if len(hash_ids) != blocks:
            raise ValueError(f"hash_ids has {len(hash_ids)} blocks: must have {blocks} for input_length={input_length}")
    session = row.get("session_id")
    return TraceRow(
        line=line,
        max_tokens=_tokens(output, row[output]),
        arrival_s=_arrival(row),
        prompt=_text("prompt", _typed(row, "prompt", str)),
        prompt_token_ids=_ids(row, "prompt_token_ids"),
        input_length=input_length,
        hash_ids=hash_ids,
        seed=_seed(row),
        temperature=_temperature(row),
        ignore_eos=_typed(row, "ignore_eos", bool),
        stop_token_ids=_ids(row, "stop_token_ids", may_be_empty=True),
        session_id=_text("session_id", None if session is None else str(session)),
        priority=_priority(row),
    )


def _at_most_one(row: dict[str, Any], *names: str) -> str | None:
    given = [name for name in names if row.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: must be one of them")
    return given[0] if given else None


def _text(name: str, value: str | None) -> str | None:
    """JSON can write half a surrogate pair, which neither a tokenizer nor a record takes."""
    if value is not None and SURROGATE.search(value):
        raise ValueError(f"{name}={_shown(ascii(value))}: must be Unicode text, has a lone surrogate")
    return value


def _shown(value: Any) -> str:
    return str(value)[:SHOWN_CHARS]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e15 or not math.isfinite(value):
        raise ValueError(f"{name}={_shown(value)}: must be a number")
    return float(value)


def _tokens(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name}={_shown(value)}: must be a whole number from 1 to {MAX_TOKENS}")
    return value


def _arrival(row: dict[str, Any]) -> float | None:
    if row.get("timestamp") is not None:
        return _number("timestamp", row["timestamp"]) / 1000.0
    return None if row.get("arrival_s") is None else _number("arrival_s", row["arrival_s"])


def _typed(row: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = row.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name}={_shown(value)}: must be of type {kind.__name__}")
    return value


def _ids(row: dict[str, Any], name: str, *, may_be_empty: bool = False) -> tuple[int, ...] | None:
    value = row.get(name)
    if value is None:
        return None
    if may_be_empty and value == []:
        return ()
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < 2**63 for i in value):
        kind = "list" if may_be_empty else "non-empty list"
        raise ValueError(f"{name}={_shown(value)}: must be a {kind} of whole numbers of at least 0")
    _tokens(f"length of {name}", len(value))
    return tuple(value)


def _seed(row: dict[str, Any]) -> int | None:
    seed = row.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        raise ValueError(f"seed={_shown(seed)}: must be a whole number from 0 to 2**63 - 1")
    return seed


def _priority(row: dict[str, Any]) -> int:
    priority = row.get("priority")
    if priority is None:
        return 0
    if type(priority) is not int or abs(priority) >= 2**31:
        raise ValueError(f"priority={_shown(priority)}: must be a whole number between -2**31 and 2**31")
    return priority


def _temperature(row: dict[str, Any]) -> float | None:
    if row.get("temperature") is None:
        return None
    value = _number("temperature", row["temperature"])
    if value < 0:
        raise ValueError(f"temperature={value}: must be at least 0")
    return value
