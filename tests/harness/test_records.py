"""The record format: what DESIGN lists, whole or not at all, null stays null, and every bad file is one line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from golden import play, timed_mixture

import harness.records as records
from harness.records import (
    REQUEST_COLUMNS,
    REQUEST_SCHEMA,
    RUN_FIELDS,
    STEP_COLUMNS,
    STEP_SCHEMA,
    TELEMETRY_COLUMNS,
    TELEMETRY_SCHEMA,
    RecordError,
    decode_numbers,
    empty_frame,
    encode,
    frame,
    read_json,
    read_run,
    read_trial,
    validate_record,
    write_json,
    write_trial,
)

inf, nan = math.inf, math.nan


def run_json(**more: Any) -> dict[str, Any]:
    run = {
        **{"study": "ladder", "arm": "static", "trial": 0, "status": "ok", "reasons": [], "config": {}, "axes": {}},
        **{"seed": 1, "provenance": {}, "window": {}, "metrics": {}, "limits": {}, "validity": [], "clock": "real"},
        "emulated": [],
    }
    return {**run, **more}


@pytest.fixture
def frames() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    recorder = play(*timed_mixture())
    telemetry = frame(
        {
            "t_s": [0.5, 1.0],
            "source": ["process", "gpu0"],
            "name": ["rss", "x"],
            "value": [1.0, None],
            "unit": ["B", "1"],
        },
        TELEMETRY_SCHEMA,
    )
    return recorder.requests(), recorder.steps(), telemetry


# --- the schema is the contract's -------------------------------------------------------------------------------------


def test_columns_are_those_of_the_contract() -> None:
    assert list(REQUEST_COLUMNS) == re.findall(
        r"\w+",
        """request_id, session_id, prompt_tokens, planned_cached_tokens, cached_prompt_tokens, max_tokens,
        output_tokens, intended_s, submitted_s, scheduled_s, first_token_s, finished_s, finish_reason, error,
        preemptions, draft_tokens, accepted_tokens, output_token_ids, emission_times_s, emission_tokens""",
    )
    assert list(STEP_COLUMNS) == re.findall(
        r"\w+",
        """step, start_s, end_s, schedule_s, prepare_s, forward_s, sample_s, commit_s, prefill_tokens, decode_tokens,
        padding_tokens, dead_rows, draft_tokens, accepted_tokens, running, waiting, preempted, slot_request_ids,
        kv_capacity_tokens, kv_used_tokens, kv_internal_tokens, kv_reserved_ahead_tokens, kv_unusable_tokens, flops,
        bytes""",
    )
    assert list(TELEMETRY_COLUMNS) == ["t_s", "source", "name", "value", "unit"]


def design_page() -> str:
    path = Path(__file__).resolve().parents[3] / "shared" / "DESIGN.md"
    if not path.exists():
        pytest.skip("the design page lies beside the project, not in it")
    return path.read_text("utf-8")


@pytest.mark.parametrize(("name", "columns"), [("requests", REQUEST_COLUMNS), ("steps", STEP_COLUMNS)])
def test_columns_are_those_of_the_design_page(name: str, columns: dict[str, Any]) -> None:
    listed = re.search(rf"- `{name}\.parquet`: (.*?)\n- `", design_page(), re.S)
    assert listed is not None
    assert re.findall(r"\w+", re.sub(r"\([^)]*\)", "", listed[1])) == list(columns)


def test_run_fields_are_those_of_the_design_page() -> None:
    listed = re.search(r"- `run\.json`: (.*?)\n- `", design_page(), re.S)
    assert listed is not None
    assert set(RUN_FIELDS) <= set(re.findall(r"`(\w+)`", listed[1]))


# --- there and back ---------------------------------------------------------------------------------------------------


def test_a_trial_comes_back_as_it_was(tmp_path: Path, frames: tuple[pd.DataFrame, ...]) -> None:
    run = run_json(
        metrics={"ttft_s": {"p99": inf, "p50": 1.5, "mean": nan}, "n": 3}, config={"rate": inf, "note": "inf"}
    )
    write_trial(tmp_path / "static" / "0", run, *frames)
    back = read_trial(tmp_path / "static" / "0")
    assert back.run["metrics"] == {"ttft_s": {"p99": inf, "p50": 1.5, "mean": None}, "n": 3}
    assert back.run["config"] == {"rate": "inf", "note": "inf"}  # a config is text to compare, never numbers to compute
    assert back.run["schema_version"] == 1
    for ours, theirs in zip(frames, (back.requests, back.steps, back.telemetry), strict=True):
        pd.testing.assert_frame_equal(ours, theirs)
    assert sorted(p.name for p in (tmp_path / "static").iterdir()) == ["0"]


def test_missing_is_null_never_zero(tmp_path: Path, frames: tuple[pd.DataFrame, ...]) -> None:
    write_trial(tmp_path / "0", run_json(), *frames)
    requests = pq.read_table(tmp_path / "0" / "requests.parquet").to_pylist()
    rejected = next(r for r in requests if r["request_id"] == "z")
    assert rejected["scheduled_s"] is None and rejected["first_token_s"] is None and rejected["session_id"] is None
    assert rejected["cached_prompt_tokens"] is None and rejected["output_tokens"] == 0
    assert rejected["emission_times_s"] == []
    steps = pq.read_table(tmp_path / "0" / "steps.parquet").to_pylist()
    assert {steps[0][name] for name in ("kv_used_tokens", "kv_capacity_tokens", "flops")} == {None}
    assert pq.read_table(tmp_path / "0" / "telemetry.parquet").to_pylist()[1]["value"] is None


def test_the_files_have_the_schema_even_when_empty(tmp_path: Path) -> None:
    write_trial(tmp_path / "0", run_json(status="not_run", reasons=["needs 810 GB, has 141 GB"]))
    for name, schema in (("requests", REQUEST_SCHEMA), ("steps", STEP_SCHEMA), ("telemetry", TELEMETRY_SCHEMA)):
        assert pq.read_schema(tmp_path / "0" / f"{name}.parquet").remove_metadata().equals(schema)
    assert len(read_trial(tmp_path / "0").requests) == 0


def test_json_is_strict(tmp_path: Path) -> None:
    value = {"a": [inf, -inf, nan, np.float32(1.5), np.int64(3), np.bool_(True), pd.NA, None, Path("x")], 1: {"b"}}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert not re.search(r"NaN|Infinity", text)
    assert json.loads(text) == {"a": ["inf", "-inf", None, 1.5, 3, True, None, None, "x"], "1": ["b"]}
    assert decode_numbers({"a": ["inf", "-inf", "x"]}) == {"a": [inf, -inf, "x"]}
    with pytest.raises(RecordError, match="cannot hold object"):
        encode({"x": object()})


# --- whole or not at all ----------------------------------------------------------------------------------------------


def test_a_killed_write_leaves_the_older_record_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "0"
    write_trial(directory, run_json(status="failed", reasons=["out of memory"]))

    def killed(path: Path, value: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            write_trial(directory, run_json())
    assert read_trial(directory).run["status"] == "failed"
    write_trial(directory, run_json())
    assert read_trial(directory).run["status"] == "ok"
    assert [p.name for p in tmp_path.iterdir()] == ["0"]  # what the killed run left has gone too


def test_a_killed_first_write_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "write_json", lambda path, value: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_trial(tmp_path / "static" / "0", run_json())
    monkeypatch.undo()
    write_json(tmp_path / "study.json", {"arms": {"static": {}}})
    assert not (tmp_path / "static" / "0").exists()
    assert read_run(tmp_path).trials == []


def test_an_ok_record_is_never_overwritten(tmp_path: Path) -> None:
    write_trial(tmp_path / "0", run_json(seed=1))
    with pytest.raises(RecordError, match="an ok record is there and is kept"):
        write_trial(tmp_path / "0", run_json(seed=2))
    assert read_trial(tmp_path / "0").run["seed"] == 1


def test_a_record_of_a_newer_schema_is_never_overwritten(tmp_path: Path) -> None:
    write_trial(tmp_path / "0", run_json(seed=1))
    newer = json.dumps({**json.loads((tmp_path / "0" / "run.json").read_text()), "schema_version": 99})
    (tmp_path / "0" / "run.json").write_text(newer)
    with pytest.raises(RecordError, match="schema_version 99 is newer"):
        write_trial(tmp_path / "0", run_json(seed=2))
    assert (tmp_path / "0" / "run.json").read_text() == newer


def test_an_unreadable_record_is_replaced(tmp_path: Path) -> None:
    write_trial(tmp_path / "0", run_json())
    (tmp_path / "0" / "run.json").write_text("{")
    write_trial(tmp_path / "0", run_json(seed=2))
    assert read_trial(tmp_path / "0").run["seed"] == 2


def test_a_frame_that_breaks_the_schema_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"requests\.parquet: does not follow the schema .*emission_times_s"):
        write_trial(tmp_path / "0", run_json(), empty_frame(REQUEST_SCHEMA).drop(columns="emission_times_s"))
    texts = empty_frame(STEP_SCHEMA).reindex([0]).assign(start_s="soon")
    with pytest.raises(RecordError, match=r"steps\.parquet: does not follow the schema"):
        write_trial(tmp_path / "0", run_json(), None, texts)
    assert list(tmp_path.iterdir()) == []


# --- bad files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "fine"}, "status 'fine', allowed: ok, failed, aborted, not_run"),
        ({"clock": "sundial"}, "clock 'sundial', allowed: real, virtual"),
        ({"trial": "0"}, "trial is str, expected int"),
        ({"trial": True}, "trial is bool, expected int"),
        ({"metrics": []}, "metrics is list, expected dict"),
        ({"reasons": "none"}, "reasons is str, expected list"),
        ({"schema_version": 2}, "schema_version 2, expected 1"),
        ({"provenance": {"git": "main"}}, "provenance.git is str, expected dict"),
        ({"axes": {"precision": "bf16"}, "config": {"precision": "bf16"}}, "config.precision is str, expected dict"),
        ({"metrics": {"ttft_s": {"p50": "fast"}}}, "metrics.ttft_s.p50 is str, expected a number or null"),
        ({"metrics": {"ttft_s": {"n": True}}}, "metrics.ttft_s.n is bool, expected a number or null"),
        ({"metrics": {"ttft_s": 7}}, "metrics.ttft_s is int, expected dict"),
        ({"metrics": {"n_failed": {"a": 1}}}, "metrics.n_failed is dict, expected a number"),
        ({"metrics": {"kv_waste": {"internal": "inf", "unusable": "x"}}}, "metrics.kv_waste.unusable is str"),
        ({"limits": {"source": "probe", "flops_per_s": True}}, "limits.flops_per_s is bool, expected a number"),
        ({"window": {"rule": 1}}, "window.rule is int, expected str"),
        ({"validity": ["busy host", 3]}, "validity[1] is int, expected str"),
        ({"emulated": {}}, "emulated is dict, expected list"),
        ({"linear_stages": [{"rows": 1}]}, "linear_stages[0] is missing apply_s, quantize_s, matmul_s, rescale_s"),
        ({"quality": {"perplexity": {"low": 1, "high": "2"}}}, "quality.perplexity.high is str, expected a number or"),
        ({"equivalence": "equal"}, "equivalence is str, expected dict"),
        ({"provenance": {"telemetry_cost": {}}}, "provenance.telemetry_cost is missing rounds, cpu_s, mean_round_s"),
        ({"config": {"batching": {"max_num_seqs": "8"}}}, "config.batching.max_num_seqs is str, expected int"),
        ({"metrics": {"output_tokens": 10**400}}, "metrics.output_tokens is beyond what a float holds"),
    ],
)
def test_validation_names_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=re.escape(f"run.json: {message}")):
        validate_record({"schema_version": 1, **run_json(), **change})
    with pytest.raises(RecordError, match=r"missing arm, seed$"):
        validate_record({k: v for k, v in {"schema_version": 1, **run_json()}.items() if k not in ("arm", "seed")})


def damage(name: str, content: bytes) -> Any:
    def act(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return act


def without_a_column(directory: Path) -> None:
    table = pq.read_table(directory / "steps.parquet")
    pq.write_table(table.drop_columns(["waiting"]), directory / "steps.parquet")


def test_what_an_earlier_version_did_not_record_is_null(tmp_path: Path, frames: tuple[pd.DataFrame, ...]) -> None:
    write_trial(tmp_path / "0", run_json(), *frames)
    path = tmp_path / "0" / "steps.parquet"
    whole = read_trial(tmp_path / "0").steps
    pq.write_table(pq.read_table(path).drop_columns(["attention_s", "drafting_sequences"]), path)
    steps = read_trial(tmp_path / "0").steps
    assert len(steps) > 0 and steps["attention_s"].isna().all() and steps["drafting_sequences"].isna().all()
    assert list(steps) == list(whole) and steps.dtypes.equals(whole.dtypes)


def with_a_text_for_a_number(directory: Path) -> None:
    table = pd.DataFrame({name: ["x"] for name in STEP_SCHEMA.names})
    table.to_parquet(directory / "steps.parquet")


@pytest.mark.parametrize(
    ("act", "named", "message"),
    [
        (damage("run.json", b""), "run.json", "not readable as JSON"),
        (damage("run.json", b"\xff\xfe"), "run.json", "not readable as JSON"),
        (damage("run.json", b"[]"), "run.json", "holds list, not an object"),
        (damage("run.json", b'{"x": NaN}'), "run.json", "NaN is not strict JSON"),
        (damage("run.json", b"[" * 100_000), "run.json", "not readable as JSON"),
        (damage("run.json", b'{"schema_version": 2}'), "run.json", "schema_version 2 is newer than 1"),
        (damage("run.json", b'{"schema_version": "1"}'), "run.json", "schema_version '1' is not a version number"),
        (damage("run.json", b'{"schema_version": 1}'), "run.json", "missing study, arm"),
        (damage("requests.parquet", b"PAR1"), "requests.parquet", "not readable as parquet"),
        (damage("steps.parquet", b""), "steps.parquet", "not readable as parquet"),
        (lambda d: (d / "telemetry.parquet").unlink(), "telemetry.parquet", "not found"),
        (without_a_column, "steps.parquet", "missing columns waiting"),
        (with_a_text_for_a_number, "steps.parquet", "wrong column type"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, act: Any, named: str, message: str) -> None:
    directory = tmp_path / "static" / "0"
    write_json(tmp_path / "study.json", {"arms": {"static": {}}, "baseline": "static"})
    write_trial(directory, run_json())
    act(directory)
    with pytest.raises(RecordError) as caught:
        read_run(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{directory / named}: ") and message in text and "\n" not in text


def test_a_cut_parquet_file_is_named(tmp_path: Path, frames: tuple[pd.DataFrame, ...]) -> None:
    write_trial(tmp_path / "0", run_json(), *frames)
    path = tmp_path / "0" / "requests.parquet"
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 20)):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordError, match=r"requests\.parquet: not readable as parquet"):
            read_trial(tmp_path / "0")


def test_corrupt_data_under_a_whole_footer_is_named_where_it_is_used(
    tmp_path: Path, frames: tuple[pd.DataFrame, ...]
) -> None:
    write_trial(tmp_path / "0", run_json(), *frames)
    path = tmp_path / "0" / "requests.parquet"
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    path.write_bytes(whole[:4] + bytes(len(whole) - 4 - footer) + whole[-footer:])
    trial = read_trial(tmp_path / "0")
    for use in (lambda: trial.requests, lambda: trial.table("requests", ["request_id"])):
        with pytest.raises(RecordError, match=r"requests\.parquet: not readable as parquet") as caught:
            use()
        assert "\n" not in str(caught.value)
    pd.testing.assert_frame_equal(trial.steps, frames[1])


def test_a_table_is_read_once_and_only_when_it_is_used(
    tmp_path: Path, frames: tuple[pd.DataFrame, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trial(tmp_path / "0", run_json(), *frames)
    read: list[str] = []
    read_table = records.read_table

    def counting(path: Path, *rest: Any) -> Any:
        read.append(path.stem)
        return read_table(path, *rest)

    monkeypatch.setattr(records, "read_table", counting)
    trial = read_trial(tmp_path / "0")
    assert trial.num_steps == len(frames[1]) > 0 and read == []
    assert trial.steps is trial.steps and read == ["steps"]


def test_some_columns_of_a_table_are_those_of_its_frame(tmp_path: Path, frames: tuple[pd.DataFrame, ...]) -> None:
    write_trial(tmp_path / "0", run_json(), *frames)
    path = tmp_path / "0" / "steps.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["attention_s"]), path)
    names = ["end_s", "attention_s", "slot_request_ids", "step"]
    table = read_trial(tmp_path / "0").table("steps", names)
    assert table.column_names == names and table["attention_s"].null_count == len(table) == len(frames[1])
    assert table["end_s"].to_pylist() == frames[1]["end_s"].tolist()


def test_a_run_lists_its_trials_in_the_plans_order(tmp_path: Path) -> None:
    write_json(tmp_path / "study.json", {"arms": {"static": {}, "paged": {}}})
    for arm, trial in (("paged", 10), ("paged", 2), ("static", 1), ("static", 0)):
        write_trial(tmp_path / arm / str(trial), run_json(arm=arm, trial=trial))
    (tmp_path / "paged" / ".2.77.old").mkdir()
    (tmp_path / "paged" / ".2.77.old" / "run.json").write_text("half")
    found = [(t.run["arm"], t.run["trial"]) for t in read_run(tmp_path).trials]
    assert found == [("static", 0), ("static", 1), ("paged", 2), ("paged", 10)]
    assert [t.run["trial"] for t in read_run(tmp_path).of_arm("paged")] == [2, 10]


def test_a_copied_record_is_told(tmp_path: Path) -> None:
    write_json(tmp_path / "study.json", {"arms": {"static": {}}})
    for trial in (0, 1):
        write_trial(tmp_path / "static" / str(trial), run_json(trial=0))
    with pytest.raises(RecordError, match=r"static/1/run\.json: is a record of static/0, as is .*static/0$"):
        read_run(tmp_path)


def test_a_run_without_a_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"study\.json: not found"):
        read_run(tmp_path)
    write_json(tmp_path / "study.json", {"arms": ["static"]})
    with pytest.raises(RecordError, match=r"study\.json: arms is list, expected dict"):
        read_run(tmp_path)
    assert read_json(tmp_path / "study.json") == {"arms": ["static"]}
