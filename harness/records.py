"""The record format (schema_version 1): one folder a trial, written whole or not at all, read back with every check.

A trial's folder holds `run.json`, `requests.parquet`, `steps.parquet` and `telemetry.parquet`, and `trace.json.gz`
where it was profiled; the run's folder holds `study.json`. Missing is null: NaN or NA in a frame, null in a file.
Infinity is the string "inf" in JSON.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = 1
STATUSES = ("ok", "failed", "aborted", "not_run")
RUN_FIELDS = (
    *("schema_version", "study", "arm", "trial", "status", "reasons", "config", "axes", "seed", "provenance", "window"),
    *("metrics", "limits", "validity", "clock", "emulated"),
)
# Beyond the contract: missing or null where it was not measured. decode_costs: of `warm_up.WarmUp`. linear_stages: what
# `linear_stages.linear_stage_times` gave. profile: of `telemetry.profiler.Profile`. quality: of
# `quality.measure_quality`.
RUN_EXTRA_FIELDS: dict[str, type] = {"decode_costs": list, "linear_stages": list, "profile": dict, "quality": dict}

_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
REQUEST_COLUMNS: dict[str, pa.DataType] = {
    "request_id": _TEXT,
    "session_id": _TEXT,
    "prompt_tokens": _INT,
    "planned_cached_tokens": _INT,
    "cached_prompt_tokens": _INT,
    "max_tokens": _INT,
    "output_tokens": _INT,
    "intended_s": _FLOAT,
    "submitted_s": _FLOAT,
    "scheduled_s": _FLOAT,
    "first_token_s": _FLOAT,
    "finished_s": _FLOAT,
    "finish_reason": _TEXT,
    "error": _TEXT,
    "preemptions": _INT,
    "draft_tokens": _INT,
    "accepted_tokens": _INT,
    "output_token_ids": pa.list_(pa.int32()),
    "emission_times_s": pa.list_(_FLOAT),
    "emission_tokens": pa.list_(pa.int32()),
}
STEP_COLUMNS: dict[str, pa.DataType] = {
    "step": _INT,
    **dict.fromkeys(("start_s", "end_s", "schedule_s", "prepare_s", "forward_s", "sample_s", "commit_s"), _FLOAT),
    **dict.fromkeys(("prefill_tokens", "decode_tokens", "padding_tokens", "dead_rows", "draft_tokens"), _INT),
    **dict.fromkeys(("accepted_tokens", "running", "waiting", "preempted"), _INT),
    "slot_request_ids": pa.list_(_TEXT),
    **dict.fromkeys(("kv_capacity_tokens", "kv_used_tokens", "kv_internal_tokens", "kv_reserved_ahead_tokens"), _INT),
    "kv_unusable_tokens": _INT,
    "flops": _FLOAT,
    "bytes": _FLOAT,
}
# Beyond the contract, null where an earlier version did not record it. propose_s: drafting. attention_s: the part of
# forward_s in which the layers store and read K/V; null where it cannot be told apart (CUDA). kept_rows: sequences that
# gained a kept token in this step. drafting_sequences: those whose drafts it verified. query_rows: rows that the model
# computed, padding and dead rows included. gathered_bytes: copied to make the cache readable. swap_s, swapped_*_bytes:
# copying the blocks of preempted sequences to host memory and back, between schedule and prepare. swapped_out: of the
# preempted, those that were copied, the others compute again; swap_kept_bytes: in host memory at the step's end.
# copied_blocks: begun as a copy of a block to which another sample of the same request writes as well.
# worker: whose step it was, where a topology has several; their steps overlap, and each has its own K/V and rows.
STEP_EXTRA_COLUMNS: dict[str, pa.DataType] = {
    "propose_s": _FLOAT,
    "attention_s": _FLOAT,
    "kept_rows": _INT,
    "drafting_sequences": _INT,
    "query_rows": _INT,
    "gathered_bytes": _INT,
    "swap_s": _FLOAT,
    "swapped_out_bytes": _INT,
    "swapped_in_bytes": _INT,
    "swapped_out": _INT,
    "swap_kept_bytes": _INT,
    "copied_blocks": _INT,
    "worker": _TEXT,
}
# Of a request whose keys and values another worker copied (all of its blocks), and how long the copying took.
REQUEST_EXTRA_COLUMNS: dict[str, pa.DataType] = {"kv_transfer_bytes": _INT, "kv_transfer_s": _FLOAT}
TELEMETRY_COLUMNS: dict[str, pa.DataType] = {
    "t_s": _FLOAT,
    "source": _TEXT,
    "name": _TEXT,
    "value": _FLOAT,
    "unit": _TEXT,
}
REQUEST_SCHEMA = pa.schema({**REQUEST_COLUMNS, **REQUEST_EXTRA_COLUMNS})
STEP_SCHEMA = pa.schema({**STEP_COLUMNS, **STEP_EXTRA_COLUMNS})
TELEMETRY_SCHEMA = pa.schema(TELEMETRY_COLUMNS)
_FRAMES = {"requests": REQUEST_SCHEMA, "steps": STEP_SCHEMA, "telemetry": TELEMETRY_SCHEMA}


class RecordError(ValueError):
    """A record that cannot be written or read: one line that names the file."""


class NewerRecordError(RecordError):
    """A record of a schema that is newer than this version reads."""


@dataclass(frozen=True)
class TrialRecord:
    """One trial as read back. ``run`` is run.json with infinities restored in `metrics`, `limits` and `window`.

    Its three tables are read when first asked for, then kept, so that who needs run.json alone pays for no table.
    RecordError there for data that is corrupt under a whole footer; all else was checked when the record was read.
    """

    path: Path
    run: dict[str, Any]

    @cached_property
    def num_steps(self) -> int:
        with _parquet(self.path / "steps.parquet") as file:
            return int(file.metadata.num_rows)

    @cached_property
    def requests(self) -> pd.DataFrame:
        return _to_frame(self.table("requests"))

    @cached_property
    def steps(self) -> pd.DataFrame:
        return _to_frame(self.table("steps"))

    @cached_property
    def telemetry(self) -> pd.DataFrame:
        return _to_frame(self.table("telemetry"))

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """``columns`` (None: all) of the table `requests`, `steps` or `telemetry`, read now and not kept.

        A few columns cost a small part of what the whole frame does.
        """
        return _read_table(self.path / f"{name}.parquet", _FRAMES[name], columns)


@dataclass(frozen=True)
class StudyRecord:
    """A run's plan and its trials, in the plan's order of arms, then by trial number."""

    path: Path
    plan: dict[str, Any]
    trials: list[TrialRecord]

    def of_arm(self, arm: str) -> list[TrialRecord]:
        return [trial for trial in self.trials if trial.run["arm"] == arm]


def frame(columns: Mapping[str, Any], schema: pa.Schema) -> pd.DataFrame:
    """A frame with the record's dtypes (Int64, float64 with NaN, strings, lists), from lists with None for null."""
    return _to_frame(pa.table({name: pa.array(columns[name], schema.field(name).type) for name in schema.names}))


def empty_frame(schema: pa.Schema) -> pd.DataFrame:
    return frame({name: [] for name in schema.names}, schema)


def _to_frame(table: pa.Table) -> pd.DataFrame:
    loaded: pd.DataFrame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return loaded


# --- JSON -------------------------------------------------------------------------------------------------------------


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
        raise RecordError(f"{path}: not readable as JSON ({_one_line(error)})") from error
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


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# --- one trial --------------------------------------------------------------------------------------------------------


def validate_record(run: Mapping[str, Any], where: str = "run.json") -> None:
    """RecordError for the first field that is missing or of the wrong kind."""
    missing = [name for name in RUN_FIELDS if name not in run]
    if missing:
        raise RecordError(f"{where}: missing {', '.join(missing)}")
    if run["schema_version"] != SCHEMA_VERSION:
        raise RecordError(f"{where}: schema_version {run['schema_version']!r}, expected {SCHEMA_VERSION}")
    if run["status"] not in STATUSES:
        raise RecordError(f"{where}: status {run['status']!r}, allowed: {', '.join(STATUSES)}")
    if run["clock"] not in ("real", "virtual"):
        raise RecordError(f"{where}: clock {run['clock']!r}, allowed: real, virtual")
    kinds: dict[type, tuple[str, ...]] = {
        str: ("study", "arm"),
        int: ("trial",),
        list: ("reasons", "validity"),
        dict: ("config", "axes", "provenance", "window", "metrics", "limits"),
    }
    for kind, names in kinds.items():
        for name in names:
            if not isinstance(run[name], kind) or isinstance(run[name], bool):
                raise RecordError(f"{where}: {name} is {type(run[name]).__name__}, expected {kind.__name__}")
    for name, kind in RUN_EXTRA_FIELDS.items():
        if not isinstance(run.get(name), kind | None):
            raise RecordError(f"{where}: {name} is {type(run[name]).__name__}, expected {kind.__name__} or null")


def write_trial(
    directory: Path,
    run: Mapping[str, Any],
    requests: pd.DataFrame | None = None,
    steps: pd.DataFrame | None = None,
    telemetry: pd.DataFrame | None = None,
    trace: bytes | None = None,
) -> None:
    """Write a trial's folder under a temporary name beside it and rename it. A frame left out is an empty one, and
    without a ``trace`` (Chrome's format, gzip) there is none.

    What a killed run left half-written there is removed; an older record that is not ok is replaced. RecordError if an
    ok record lies there already, or if ``run`` or a frame does not follow the schema.
    """
    record = encode({"schema_version": SCHEMA_VERSION, **run})
    validate_record(record, str(directory / "run.json"))
    if _status(directory) == "ok":
        raise RecordError(f"{directory}: an ok record is there and is kept")
    directory.parent.mkdir(parents=True, exist_ok=True)
    for stale in directory.parent.glob(f".{directory.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    for (name, schema), data in zip(_FRAMES.items(), (requests, steps, telemetry), strict=True):
        path = temporary / f"{name}.parquet"
        try:
            table = pa.Table.from_pandas(empty_frame(schema) if data is None else data, schema, preserve_index=False)
        except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
            shutil.rmtree(temporary)
            raise RecordError(f"{directory / path.name}: does not follow the schema ({_one_line(error)})") from error
        pq.write_table(table, path, compression="zstd")
    if trace is not None:
        (temporary / "trace.json.gz").write_bytes(trace)
    write_json(temporary / "run.json", record)
    if directory.exists():
        replaced = directory.with_name(f".{directory.name}.{os.getpid()}.old")
        directory.rename(replaced)
        temporary.rename(directory)
        shutil.rmtree(replaced)
    else:
        temporary.rename(directory)


def _status(directory: Path) -> str | None:
    """The status recorded there; None if there is no readable record, which a new one may replace.

    NewerRecordError for one of a newer schema: it is whole, and another version's to replace.
    """
    try:
        return str(read_json(directory / "run.json").get("status"))
    except NewerRecordError:
        raise
    except RecordError:
        return None


def read_trial(directory: Path, tables: bool = True) -> TrialRecord:
    """RecordError, naming the file, for anything that is missing, corrupt or of a newer schema version.

    tables: look at the three tables' footers too; who reads them anyway, or needs run.json alone, need not.
    """
    path = directory / "run.json"
    run = read_json(path)
    validate_record(run, str(path))
    run |= {name: decode_numbers(run[name]) for name in ("metrics", "limits", "window")}
    if tables:
        for name, schema in _FRAMES.items():
            _check_table(directory / f"{name}.parquet", schema)
    return TrialRecord(directory, run)


def _check_table(path: Path, schema: pa.Schema) -> None:
    """Its footer says whether it follows the schema; where not quite, the data must convert."""
    with _parquet(path) as file:
        as_written = file.schema_arrow.equals(schema)
    if not as_written:
        _read_table(path, schema)


def _read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    with _parquet(path) as file:
        there = set(file.schema_arrow.names)
        missing = [name for name in wanted.names if name not in there]
        required = [name for name in missing if name not in {**STEP_EXTRA_COLUMNS, **REQUEST_EXTRA_COLUMNS}]
        if required:
            raise RecordError(f"{path}: missing columns {', '.join(required)}")
        names = [name for name in wanted.names if name in there]
        # Of a small file this takes a third less than `file.read`.
        table = file.read_row_groups(range(file.num_row_groups), names, use_threads=False)
    for name in missing:
        table = table.append_column(name, pa.nulls(len(table), wanted.field(name).type))
    if table.schema.equals(wanted):
        return table
    try:
        return table.select(wanted.names).cast(wanted)
    except (pa.ArrowException, ValueError) as error:
        raise RecordError(f"{path}: wrong column type ({_one_line(error)})") from error


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        raise RecordError(f"{path}: not found") from None
    except (OSError, pa.ArrowException) as error:
        raise RecordError(f"{path}: not readable as parquet ({_one_line(error)})") from error


def read_run(run_dir: Path, tables: bool = True) -> StudyRecord:
    """The plan and every trial recorded so far. RecordError if the plan or any record that is there cannot be read;
    ``tables`` as in `read_trial`.
    """
    plan = read_json(run_dir / "study.json")
    if not isinstance(plan.get("arms"), dict):
        raise RecordError(f"{run_dir / 'study.json'}: arms must be an object of arms by name")
    trials = [
        read_trial(path.parent, tables)
        for path in sorted(run_dir.glob("*/*/run.json"))
        if not any(part.startswith(".") for part in path.relative_to(run_dir).parts)
    ]
    order = {arm: index for index, arm in enumerate(plan["arms"])}
    trials.sort(key=lambda trial: (order.get(trial.run["arm"], len(order)), trial.run["trial"]))
    return StudyRecord(run_dir, plan, trials)
