"""The field `priority` of a recorded request."""

from __future__ import annotations

import json

import pytest

from workloads import build_stream
from workloads.errors import WorkloadError

ROW = {"input_length": 4, "output_length": 2}


def stream(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    config = {"name": "trace", "path": str(path)}
    return build_stream(config, seed=0, tokenizer=None, max_model_len=64, vocab_size=500)


def test_a_recorded_priority_reaches_the_request_and_0_is_the_default(tmp_path):
    requests = stream(tmp_path / "t.jsonl", {**ROW, "priority": -3}, ROW, {**ROW, "priority": 2}).initial()
    assert [request.priority for request in requests] == [-3, 0, 2]


@pytest.mark.parametrize("value", [1.5, "high", True, 2**31])
def test_any_other_priority_is_refused_with_its_line(tmp_path, value):
    with pytest.raises(WorkloadError, match=r"line 2: priority=.*: must be a whole number"):
        stream(tmp_path / "t.jsonl", ROW, {**ROW, "priority": value})
