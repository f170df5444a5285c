"""The tables of a record: the columns of its three parquet files, and reading them with every check.

Missing is null: NaN or NA in a frame, null in a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.record_json import RecordError, said

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
# gained a kept token in this step; emitted_tokens: the tokens that they gained. drafting_sequences: those whose drafts
# it verified. query_rows: rows that the model computed, padding and dead rows included. gathered_bytes: copied to make
# the cache readable. swap_s, swapped_*_bytes: copying the blocks of preempted sequences to host memory and back,
# between schedule and prepare. swapped_out: of the preempted, those that were copied, the others compute again;
# swap_kept_bytes: in host memory at the step's end.
# copied_blocks: begun as a copy of a block to which another sample of the same request writes as well.
# worker: whose step it was, where a topology has several; their steps overlap, and each has its own K/V and rows.
# replayed: 1 where its forward pass was the replay of a captured graph, 0 where it was launched.
STEP_EXTRA_COLUMNS: dict[str, pa.DataType] = {
    "propose_s": _FLOAT,
    "attention_s": _FLOAT,
    "kept_rows": _INT,
    "emitted_tokens": _INT,
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
    "replayed": _INT,
}
# kv_transfer_*: of a request whose keys and values another worker copied (all of its blocks), and how long that took.
# priority: its class, 0 before 1.
REQUEST_EXTRA_COLUMNS: dict[str, pa.DataType] = {
    "kv_transfer_bytes": _INT,
    "kv_transfer_s": _FLOAT,
    "priority": _INT,
}
# t_s: the first samples lie shortly before 0, so that a counter is known where a window opens.
TELEMETRY_COLUMNS: dict[str, pa.DataType] = {
    "t_s": _FLOAT,
    "source": _TEXT,
    "name": _TEXT,
    "value": _FLOAT,
    "unit": _TEXT,
}
SLOTS = "slot_request_ids"
REQUEST_SCHEMA = pa.schema({**REQUEST_COLUMNS, **REQUEST_EXTRA_COLUMNS})
STEP_SCHEMA = pa.schema({**STEP_COLUMNS, **STEP_EXTRA_COLUMNS})
TELEMETRY_SCHEMA = pa.schema(TELEMETRY_COLUMNS)
FRAMES = {"requests": REQUEST_SCHEMA, "steps": STEP_SCHEMA, "telemetry": TELEMETRY_SCHEMA}


def frame(columns: Mapping[str, Any], schema: pa.Schema) -> pd.DataFrame:
    """A frame with the record's dtypes (Int64, float64 with NaN, strings, lists), from lists with None for null."""
    return to_frame(pa.table({name: pa.array(columns[name], schema.field(name).type) for name in schema.names}))


def empty_frame(schema: pa.Schema) -> pd.DataFrame:
    return frame({name: [] for name in schema.names}, schema)


def to_frame(table: pa.Table) -> pd.DataFrame:
    """Whole numbers that may be null are Int64, which keeps them whole."""
    loaded: pd.DataFrame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return loaded


def check_table(path: Path, schema: pa.Schema) -> None:
    """RecordError unless it follows the schema. Its footer says so; where not quite, the data must convert."""
    with open_parquet(path) as file:
        as_written = file.schema_arrow.equals(schema)
    if not as_written:
        read_table(path, schema)


def read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """``columns`` (None: all); one beyond the contract that the file lacks is null. RecordError if the file is bad."""
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    with open_parquet(path) as file:
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
    try:
        table = table if table.schema.equals(wanted) else table.select(wanted.names).cast(wanted)
    except (pa.ArrowException, ValueError) as error:
        raise RecordError(f"{path}: wrong column type ({said(error)})") from error
    if SLOTS in wanted.names and table[SLOTS].null_count:
        raise RecordError(f"{path}: {SLOTS} is null somewhere: a step without slots has an empty list")
    return table


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """RecordError, naming the file, for what is missing or no parquet, also while it is read."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        raise RecordError(f"{path}: not found") from None
    except (OSError, pa.ArrowException) as error:
        raise RecordError(f"{path}: not readable as parquet ({said(error)})") from error
