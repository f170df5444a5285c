"""Tokens that end a request: of a whole workload, and of one recorded request."""

from __future__ import annotations

import json

import pytest

from workloads import build_stream
from workloads.errors import WorkloadError

ROW = {"input_length": 4, "output_length": 2}


def stream(config):
    return build_stream(config, seed=0, tokenizer=None, max_model_len=64, vocab_size=500)


def trace(path, *rows, **sampling):
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"name": "trace", "path": str(path), "sampling": sampling}


def test_every_request_of_a_workload_has_them(plain):
    requests = stream(plain(sampling={"stop_token_ids": [7, 499]})).initial()
    assert requests and {request.sampling.stop_token_ids for request in requests} == {(7, 499)}
    assert {request.sampling.stop_token_ids for request in stream(plain()).initial()} == {()}


def test_a_recorded_request_has_its_own(tmp_path):
    """An empty list is one of its own too: nothing but the end of sequence ends that request."""
    rows = ({**ROW, "stop_token_ids": [3, 9]}, ROW, {**ROW, "stop_token_ids": []}, {**ROW, "stop_token_ids": None})
    requests = stream(trace(tmp_path / "t.jsonl", *rows, stop_token_ids=[5])).initial()
    assert [request.sampling.stop_token_ids for request in requests] == [(3, 9), (5,), (), (5,)]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([3, 500], "stop_token_ids has 500: must lie in 0..499"),
        ([-1], "stop_token_ids has -1: must lie in 0..499"),
        ([1.5], "stop_token_ids=1.5: must be a whole number"),
        (7, "stop_token_ids=7: must be a list"),
        ("7", "stop_token_ids=7: must be a list"),
    ],
)
def test_any_others_are_refused(plain, given, why):
    with pytest.raises(WorkloadError) as refused:
        stream(plain(sampling={"stop_token_ids": given}))
    assert f"workload.sampling.{why}" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([3, 500], "stop_token_ids has 500: must lie in 0..499"),
        ([-1], r"stop_token_ids=\[-1\]: must be a list of whole numbers"),
        ([True], r"stop_token_ids=\[True\]: must be a list of whole numbers"),
        (7, "stop_token_ids=7: must be a list of whole numbers"),
    ],
)
def test_any_others_are_refused_with_their_line(tmp_path, given, why):
    with pytest.raises(WorkloadError, match=f"line 2: {why}"):
        stream(trace(tmp_path / "t.jsonl", ROW, {**ROW, "stop_token_ids": given}))
