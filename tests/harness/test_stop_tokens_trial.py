"""`workload.sampling.stop_token_ids` and the field of a trace, from the command line to the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from direct_study import run_study

from harness.records import read_trial

ARM = [
    *("study=none", "model=tiny", "precision=fp32", "device=cpu", "device.threads=1", "attention=sdpa"),
    *("model.max_model_len=64", "kv_cache.budget=256tokens", "batching.max_num_seqs=4", "isolation=inline"),
    *("batching.max_num_batched_tokens=64", "workload=trace"),
]
PROMPTS = ([11, 12, 13], [21, 22], [31, 32, 33, 34])


def outputs_of(folder: Path, own: list[list[int] | None], *options: str) -> dict[str, tuple[list[int], str]]:
    """Output and reason of its end, by request."""
    folder.mkdir()
    rows = [{"prompt_token_ids": p, "max_tokens": 12, "stop_token_ids": s} for p, s in zip(PROMPTS, own, strict=True)]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run_study([*ARM, f"workload.path={folder / 't.jsonl'}", f"run_dir={folder / 'run'}", *options]) == 0
    table = read_trial(folder / "run/single/0").requests
    columns = zip(table["request_id"], table["output_token_ids"], table["finish_reason"], strict=True)
    return {name: (list(map(int, tokens)), reason) for name, tokens, reason in columns}


def test_a_request_ends_with_the_first_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = outputs_of(tmp_path / "whole", [None] * 3)
    assert [(len(tokens), reason) for tokens, reason in whole.values()] == [(12, "length")] * 3
    first, second, third = (tokens for tokens, _ in whole.values())
    of_all, of_second = first[4], second[6]

    def cut(tokens: list[int], *stops: int) -> tuple[list[int], str]:
        end = next((i for i, token in enumerate(tokens, 1) if token in stops), None)
        return tokens[:end], "length" if end is None else "stop"

    options = f"workload.sampling.stop_token_ids=[{of_all},{third[2]}]"
    ended = outputs_of(tmp_path / "ended", [None, [of_second], []], options)
    assert list(ended.values()) == [cut(first, of_all, third[2]), cut(second, of_second), (third, "length")]
    assert len(ended[next(iter(ended))][0]) < 12, "it has ended"
    capsys.readouterr()
    path = tmp_path / "whole" / "t.jsonl"
    command = [*ARM, f"workload.path={path}", f"run_dir={tmp_path / 'no'}", "workload.sampling.stop_token_ids=[3,512]"]
    assert run_study(command) == 2
    error = capsys.readouterr().err
    assert "workload.sampling.stop_token_ids has 512: must lie in 0..511" in error and error.count("\n") == 1
