"""Trace files of somebody who means harm: one line that names the line, and bounded memory."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import workloads.trace
from workloads import RequestStream, WorkloadError, build_stream

ROW = {"input_length": 4, "max_tokens": 1}


def replay(path: Path, **options: Any) -> RequestStream:
    config = {"name": "trace", "path": str(path), **options}
    return build_stream(config, seed=0, tokenizer=None, max_model_len=64, vocab_size=500)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(WorkloadError) as caught:
        replay(path, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000 and path.name in message
    return message


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_damaged_archive_wherever_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    whole = gzip.compress("\n".join(json.dumps({**ROW, "seed": i}) for i in range(2000)).encode())
    said = set()
    for at in range(2, len(whole), len(whole) // 25):
        path.write_bytes(whole[:at] + bytes(byte ^ 0x55 for byte in whole[at : at + 8]) + whole[at + 8 :])
        try:
            replay(path)
        except WorkloadError as error:
            assert "\n" not in str(error)
            said.add(str(error))
    assert any("Error -3 while decompressing" in reason for reason in said)


BAD_ROWS = {
    "a key of megabytes": ({**ROW, "k" * 5_000_000: 1}, "not a field"),
    "a key of two lines": ({**ROW, "input\nlenght": 1}, "input lenght: not a field"),
    "a value of two lines": ({**ROW, "seed": "1\n2"}, "seed=1 2: must be a whole number"),
    "a value of megabytes": ({**ROW, "timestamp": "9" * 5_000_000}, "timestamp=9999"),
    "an integer of 5,000 digits": (f'{{"input_length": {"9" * 5000}, "max_tokens": 1}}', "must be one JSON object"),
    "a number past every float": ({**ROW, "arrival_s": 10**400}, "arrival_s=1000"),
    "deep": ("[" * 1_000_000, "must be one JSON object"),
    "half a surrogate pair, prompt": ('{"prompt": "a\\ud800", "max_tokens": 1}', "prompt='a\\ud800'"),
    "half a surrogate pair, session": ({**ROW, "session_id": "\udfff"}, "session_id='\\udfff'"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_hostile_row_is_one_short_line(case: str, tmp_path: Path) -> None:
    row, said = BAD_ROWS[case]
    began = time.monotonic()
    message = refusal(written(tmp_path, ROW, row))
    assert said in message and "line 2" in message
    assert time.monotonic() - began < 5


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads.trace, "MAX_LINE_CHARS", 100_000)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "' + b"a" * 50_000_000))
    tracemalloc.start()
    message = refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "line 1: must be one JSON object" in message and peak < 5_000_000


def test_more_requests_than_fit_want_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads.trace, "MAX_TRACE_SIZE", 2000)
    path = written(tmp_path, *[ROW] * 100)
    message = refusal(path, skip_head=10)
    assert "workload.limit=null: must be below " in message
    largest = int(message.partition("below ")[2].partition(":")[0]) - 1
    assert replay(path, skip_head=10, limit=largest).num_requests == largest
    assert "must be below" in refusal(path, skip_head=10, limit=largest + 1)


def test_a_few_bytes_do_not_order_prompts_of_many_gigabytes(tmp_path: Path) -> None:
    path = written(tmp_path, *[{"input_length": 10_000_000, "max_tokens": 1}] * 100)
    assert path.stat().st_size < 5000
    assert "workload.limit=null: must be below 27: " in refusal(path)
    assert replay(path, limit=26).num_requests == 26
