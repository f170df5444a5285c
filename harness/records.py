"""The record format (schema_version 1): one folder a trial, written whole or not at all, read back with every check.

A trial's folder holds `run.json`, `requests.parquet`, `steps.parquet` and `telemetry.parquet`, and `trace.json.gz`
where it was profiled; the run's folder holds `study.json`. Missing is null: NaN or NA in a frame, null in a file.
Infinity is the string "inf" in JSON.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.record_json import (
    SCHEMA_VERSION,
    NewerRecordError,
    RecordError,
    decode_numbers,
    encode,
    read_json,
    said,
    write_json,
)
from harness.record_shape import RUN, check_plan, check_run
from harness.record_tables import (
    FRAMES,
    REQUEST_COLUMNS,
    REQUEST_SCHEMA,
    STEP_COLUMNS,
    STEP_SCHEMA,
    TELEMETRY_COLUMNS,
    TELEMETRY_SCHEMA,
    check_table,
    empty_frame,
    frame,
    open_parquet,
    read_table,
    to_frame,
)

__all__ = [
    "REQUEST_COLUMNS",
    "REQUEST_SCHEMA",
    "RUN_FIELDS",
    "SCHEMA_VERSION",
    "STEP_COLUMNS",
    "STEP_SCHEMA",
    "TELEMETRY_COLUMNS",
    "TELEMETRY_SCHEMA",
    "NewerRecordError",
    "RecordError",
    "StudyRecord",
    "TrialRecord",
    "check_place",
    "decode_numbers",
    "empty_frame",
    "encode",
    "frame",
    "read_json",
    "read_plan",
    "read_run",
    "read_trial",
    "rewrite_run",
    "validate_record",
    "write_json",
    "write_trial",
]

STATUSES = ("ok", "failed", "aborted", "not_run")
RUN_FIELDS = tuple(RUN)
INFINITE = ("metrics", "limits", "window")  # in which "inf" is a number


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
        """Read off the file's footer: no table is read."""
        with open_parquet(self.path / "steps.parquet") as file:
            return int(file.metadata.num_rows)

    @cached_property
    def requests(self) -> pd.DataFrame:
        return to_frame(self.table("requests"))

    @cached_property
    def steps(self) -> pd.DataFrame:
        return to_frame(self.table("steps"))

    @cached_property
    def telemetry(self) -> pd.DataFrame:
        return to_frame(self.table("telemetry"))

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """``columns`` (None: all) of the table `requests`, `steps` or `telemetry`, read now and not kept.

        A few columns cost a small part of what the whole frame does.
        """
        return read_table(self.path / f"{name}.parquet", FRAMES[name], columns)


@dataclass(frozen=True)
class StudyRecord:
    """A run's plan and its trials, in the plan's order of arms, then by trial number."""

    path: Path
    plan: dict[str, Any]
    trials: list[TrialRecord]

    def of_arm(self, arm: str) -> list[TrialRecord]:
        return [trial for trial in self.trials if trial.run["arm"] == arm]


def validate_record(run: Mapping[str, Any], where: str = "run.json") -> dict[str, Any]:
    """``run``, its infinities numbers again. RecordError for the first field that is missing or of the wrong kind."""
    decoded = {**run, **{name: decode_numbers(run[name]) for name in INFINITE if name in run}}
    check_run(decoded, where)
    if run["schema_version"] != SCHEMA_VERSION:
        raise RecordError(f"{where}: schema_version {run['schema_version']!r}, expected {SCHEMA_VERSION}")
    if run["status"] not in STATUSES:
        raise RecordError(f"{where}: status {run['status']!r}, allowed: {', '.join(STATUSES)}")
    if run["clock"] not in ("real", "virtual"):
        raise RecordError(f"{where}: clock {run['clock']!r}, allowed: real, virtual")
    return decoded


def write_trial(
    directory: Path,
    run: Mapping[str, Any],
    requests: pd.DataFrame | None = None,
    steps: pd.DataFrame | None = None,
    telemetry: pd.DataFrame | None = None,
) -> None:
    """Write a trial's folder under a temporary name beside it and rename it. A frame left out is an empty one.

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
    for (name, schema), data in zip(FRAMES.items(), (requests, steps, telemetry), strict=True):
        path = temporary / f"{name}.parquet"
        try:
            table = pa.Table.from_pandas(empty_frame(schema) if data is None else data, schema, preserve_index=False)
        except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
            shutil.rmtree(temporary)
            raise RecordError(f"{directory / path.name}: does not follow the schema ({said(error)})") from error
        pq.write_table(table, path, compression="zstd")
    write_json(temporary / "run.json", record)
    if directory.exists():
        replaced = directory.with_name(f".{directory.name}.{os.getpid()}.old")
        directory.rename(replaced)
        temporary.rename(directory)
        shutil.rmtree(replaced)
    else:
        temporary.rename(directory)


def rewrite_run(directory: Path, run: Mapping[str, Any], trace: bytes | None = None) -> None:
    """Put a recorded trial's run.json in place of what is there, in one piece, and its ``trace`` (Chrome's format,
    gzip) beside it first. RecordError if ``run`` does not follow the schema.
    """
    record = encode({"schema_version": SCHEMA_VERSION, **run})
    validate_record(record, str(directory / "run.json"))
    if trace is not None:
        temporary = directory / f".trace.json.gz.{os.getpid()}.tmp"
        temporary.write_bytes(trace)
        os.replace(temporary, directory / "trace.json.gz")
    write_json(directory / "run.json", record)


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
    run = validate_record(read_json(path), str(path))
    if tables:
        for name, schema in FRAMES.items():
            check_table(directory / f"{name}.parquet", schema)
    return TrialRecord(directory, run)


def read_plan(path: Path, resumed: bool = False) -> dict[str, Any]:
    """RecordError, naming the file, unless it holds a plan as a report reads it, or as a study does that goes on."""
    plan = read_json(path)
    check_plan(plan, path, resumed)
    return plan


def check_place(trial: TrialRecord) -> None:
    """RecordError for a record in the folder of another trial of a plan: that one would not run, and this one count."""
    own = (str(trial.run["arm"]), str(trial.run["trial"]))
    if own != trial.path.absolute().parts[-2:]:
        raise RecordError(f"{trial.path / 'run.json'}: is the record of {'/'.join(own)}, which is not its folder")


def read_run(run_dir: Path, tables: bool = True) -> StudyRecord:
    """The plan and every trial recorded so far. RecordError if the plan or any record that is there cannot be read;
    ``tables`` as in `read_trial`.
    """
    plan = read_plan(run_dir / "study.json")
    trials = [
        read_trial(path.parent, tables)
        for path in sorted(run_dir.glob("*/*/run.json"))
        if not any(part.startswith(".") for part in path.relative_to(run_dir).parts)
    ]
    places: dict[tuple[str, int], Path] = {}
    for trial in trials:
        own = (trial.run["arm"], trial.run["trial"])
        if own in places:  # a copied folder: one of the two would be left out, or count twice
            raise RecordError(f"{trial.path / 'run.json'}: is a record of {own[0]}/{own[1]}, as is {places[own]}")
        places[own] = trial.path
    order = {arm: index for index, arm in enumerate(plan["arms"])}
    trials.sort(key=lambda trial: (order.get(trial.run["arm"], len(order)), trial.run["trial"]))
    return StudyRecord(run_dir, plan, trials)
