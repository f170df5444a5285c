"""The summary from records alone: its shape, medians, ratios, what is not comparable, and the table."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import harness.records as records
from harness.records import decode_numbers, read_json, read_run, write_json, write_trial
from harness.report import build
from harness.summary import TABLE_COLUMNS, incomparable, summarize, table_rows

WORKLOAD = {"arrivals": {"name": "burst"}, "num_requests": 48}
CONTENT = {"file_sha256": "1", "clipped_to": None, "text": {"corpus_sha256": "1"}}
OTHER_CONTENT = ({"file_sha256": "2"}, {"clipped_to": 512}, {"text": {"corpus_sha256": "2"}})
HARDWARE = {"hardware": {"cpu": "x", "cores": 2}, "workload": CONTENT}
PLAN = {
    "baseline": "static",
    "arms": {
        "static": {"versus": None},
        "continuous": {"versus": "static"},
        "paged": {"versus": "continuous"},
        "fp8": {"versus": "paged"},
        "llama": {"versus": "static"},
    },
}


def record(run_dir: Path, arm: str, trial: int, speed: float | None, **more: Any) -> dict[str, Any]:
    run = {
        **{
            "study": "ladder",
            "arm": arm,
            "trial": trial,
            "status": "ok",
            "reasons": [],
            "axes": {},
            "seed": 100 + trial,
        },
        "config": {"workload": WORKLOAD, "model": {"name": "tiny", "max_model_len": 768}},
        "provenance": HARDWARE | {"model": {"name": "tiny", "fingerprint": "a"}},
        "window": {"start_s": 0.0, "end_s": 1.0, "rule": "burst"},
        "metrics": {
            "output_tokens_per_s": speed,
            "ttft_s": {"p50": 1.0, "p99": math.inf if arm == "paged" else 2.0, "n": 48},
            "itl_s": {"p50": 0.02, "p99": 0.0304, "n": 900},
            "kv_waste": {"internal": 0.5, "reserved_ahead": 0.125, "unusable": 0.0},
            "slot_utilization": 0.5 if arm in ("static", "continuous") else None,
            "acceptance_rate": None,
            "peak_memory_bytes": 512e6,
            "equivalence": "identical",
        },
        **{"limits": {}, "validity": [], "clock": "real", "emulated": []},
        **more,
    }
    write_trial(run_dir / arm / str(trial), run)
    return run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_json(tmp_path / "study.json", PLAN)
    for trial, (static, continuous, paged) in enumerate([(10.0, 20.0, 30.0), (12.0, 24.0, 39.0), (11.0, 22.0, 36.0)]):
        record(tmp_path, "static", trial, static)
        record(tmp_path, "continuous", trial, continuous)
        record(tmp_path, "paged", trial, paged)
    record(tmp_path, "fp8", 0, 5.0, emulated=["fp8 rounds to E4M3 and computes in BF16"])
    record(tmp_path, "llama", 0, None, status="not_run", reasons=["needs 810 GB, has 141 GB"], metrics={})
    return tmp_path


def test_shape_is_the_contracts(run_dir: Path) -> None:
    summary = summarize(run_dir)
    assert list(summary) == ["baseline", "arms"] and list(summary["arms"]) == list(PLAN["arms"])
    for entry in summary["arms"].values():
        assert list(entry) == ["status", "reasons", "warnings", "metrics", "ratios", "versus", "step_ratios"]
        for ratios in (entry["ratios"], entry["step_ratios"] or {}):
            assert all(list(r) == ["median", "low", "high", "n", "verdict"] for r in ratios.values())
    assert summary["arms"]["static"]["step_ratios"] is None and summary["arms"]["static"]["versus"] is None
    assert decode_numbers(read_json(run_dir / "summary.json")) == summary


def test_medians_are_over_trials_and_names_are_flat(run_dir: Path) -> None:
    metrics = summarize(run_dir)["arms"]["paged"]["metrics"]
    assert metrics["output_tokens_per_s"] == 36.0
    assert metrics["ttft_s.p99"] == math.inf and metrics["ttft_s.n"] == 48
    assert metrics["kv_waste.reserved_ahead"] == 0.125
    assert metrics["slot_utilization"] is None and "equivalence" not in metrics
    written = json.loads((run_dir / "summary.json").read_text(), parse_constant=pytest.fail)
    assert written["arms"]["paged"]["metrics"]["ttft_s.p99"] == "inf"


def test_ratios_are_paired_by_trial(run_dir: Path) -> None:
    paged = summarize(run_dir)["arms"]["paged"]
    assert paged["ratios"]["output_tokens_per_s"]["median"] == pytest.approx(3.25)  # of 3, 3.25, 3.2727: not 36/11
    assert paged["step_ratios"]["output_tokens_per_s"]["median"] == pytest.approx(39 / 24)
    assert paged["ratios"]["output_tokens_per_s"]["verdict"] == "better"
    assert paged["ratios"]["ttft_s.p50"]["verdict"] == "no difference shown"
    assert paged["ratios"]["ttft_s.p99"] == {
        **dict.fromkeys(("median", "low", "high")),
        **{"n": 0, "verdict": "no difference shown"},  # inf leaves no pair
    }
    assert not {"ttft_s.n", "equivalence"} & set(paged["ratios"])


def test_a_constant_ratio_has_a_closed_interval(run_dir: Path) -> None:
    found = summarize(run_dir)["arms"]["continuous"]["ratios"]["output_tokens_per_s"]
    assert found["low"] <= found["median"] <= found["high"] and found["n"] == 3
    assert [found[k] for k in ("low", "median", "high")] == pytest.approx([2.0] * 3) and found["verdict"] == "better"


def test_emulated_speed_has_no_ratio(run_dir: Path) -> None:
    fp8 = summarize(run_dir)["arms"]["fp8"]
    for ratios in (fp8["ratios"], fp8["step_ratios"]):
        assert {(r["median"], r["low"], r["high"], r["verdict"]) for r in ratios.values()} == {
            (None, None, None, "not comparable")
        }
    assert fp8["metrics"]["output_tokens_per_s"] == 5.0


def test_statuses_and_reasons(run_dir: Path) -> None:
    record(run_dir, "fp8", 1, None, status="failed", reasons=["out of memory"], metrics={"output_tokens_per_s": 1.0})
    arms = summarize(run_dir)["arms"]
    assert (arms["llama"]["status"], arms["llama"]["reasons"]) == ("not_run", ["needs 810 GB, has 141 GB"])
    assert arms["llama"]["metrics"] == arms["llama"]["ratios"] == {}
    assert (arms["fp8"]["status"], arms["fp8"]["reasons"]) == ("failed", ["out of memory"])
    assert arms["fp8"]["metrics"]["output_tokens_per_s"] == 5.0  # of the trial that is ok


def test_an_arm_without_a_record_is_there(tmp_path: Path) -> None:
    write_json(tmp_path / "study.json", PLAN)
    arms = summarize(tmp_path)["arms"]
    assert {(a["status"], *a["reasons"]) for a in arms.values()} == {("not_run", "no trial recorded")}


def test_an_adaptive_study_reports_at_98_percent(run_dir: Path) -> None:
    plain = summarize(run_dir)["arms"]["paged"]["ratios"]["output_tokens_per_s"]
    write_json(run_dir / "study.json", {**PLAN, "half_width": 0.03})
    adaptive = summarize(run_dir)["arms"]["paged"]["ratios"]["output_tokens_per_s"]
    assert adaptive["low"] < plain["low"] and adaptive["high"] > plain["high"]


def test_the_same_records_give_the_same_bytes(run_dir: Path) -> None:
    summarize(run_dir)
    first = (run_dir / "summary.json").read_bytes()
    summarize(run_dir)
    assert (run_dir / "summary.json").read_bytes() == first
    assert sorted(p.name for p in run_dir.iterdir() if p.is_file()) == ["study.json", "summary.json"]


def test_it_reads_no_table_and_takes_records_that_are_read(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = summarize(run_dir)
    monkeypatch.delattr(records, "read_table")
    study = read_run(run_dir)
    for path in run_dir.glob("*/*/run.json"):
        path.unlink()
    assert summarize(run_dir, study) == expected
    assert decode_numbers(read_json(run_dir / "summary.json")) == expected


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({}, []),
        ({"provenance": {"hardware": {"cpu": "y", "cores": 2}, "git": {"commit": "other"}}}, ["machine differs"]),
        ({"provenance": HARDWARE | {"git": {"commit": "other"}}}, []),
        # A record without a fingerprint is compared by its option.
        ({"provenance": HARDWARE, "config": {"workload": WORKLOAD, "model": {"name": "llama3_8b"}}}, ["model differs"]),
        ({"provenance": HARDWARE}, []),
        ({"config": {"workload": WORKLOAD, "model": {"name": "tiny", "max_model_len": 9}, "precision": {}}}, []),
        ({"config": {"workload": {}, "model": {"name": "tiny"}}}, ["traffic differs"]),
        ({"seed": 7}, ["traffic differs"]),
        *(({"provenance": HARDWARE | {"workload": content}}, ["traffic differs"]) for content in OTHER_CONTENT),
        # A record from before it was told is compared by what it tells.
        ({"provenance": HARDWARE | {"workload": {"file": "t.jsonl", "text": {"distinct_first_tokens": 9}}}}, []),
        ({"clock": "virtual"}, ["clock differs"]),
        ({"provenance": HARDWARE | {"model": {"name": "tiny", "fingerprint": "b"}}}, ["model differs"]),
        ({"provenance": HARDWARE | {"model": {"name": "tiny", "fingerprint": "a"}}}, []),
        (
            {
                "provenance": HARDWARE | {"model": {"name": "copy", "fingerprint": "a"}},
                "config": {"workload": WORKLOAD, "model": {"name": "copy", "path": "elsewhere"}},
            },
            [],
        ),
        ({"emulated": ["fp8"]}, ["emulated: ['fp8']"]),
    ],
)
def test_what_makes_two_trials_incomparable(tmp_path: Path, change: dict[str, Any], reasons: list[str]) -> None:
    ours, theirs = record(tmp_path, "a", 0, 1.0), record(tmp_path, "b", 0, 1.0, **change)
    assert incomparable(ours, theirs) == incomparable(theirs, ours) == reasons


def test_other_traffic_gives_no_ratio(tmp_path: Path) -> None:
    write_json(tmp_path / "study.json", {"arms": {"rate=2": {}, "rate=4": {}}})
    record(tmp_path, "rate=2", 0, 1.0)
    record(tmp_path, "rate=4", 0, 2.0, config={"workload": {"rate": 4}, "model": {"name": "tiny"}})
    summary = summarize(tmp_path)
    assert summary["baseline"] == "rate=2"
    assert summary["arms"]["rate=4"]["ratios"]["output_tokens_per_s"]["verdict"] == "not comparable"


def test_the_table(run_dir: Path) -> None:
    rows = {row["arm"]: row for row in table_rows(summarize(run_dir))}
    assert all(tuple(row) == TABLE_COLUMNS for row in rows.values())
    assert list(rows["continuous"].values()) == [
        *("continuous", "22.0", "2.00x [2.00, 2.00]", "2.00x [2.00, 2.00] vs static", "3"),
        *("1.00 / 2.00", "20.0 / 30.4", "50.0 %", "62.5 %", "-", "512 MB"),
    ]
    assert rows["static"]["vs baseline"] == "baseline" and rows["static"]["vs previous"] == ""
    assert rows["paged"]["TTFT p50/p99 s"] == "1.00 / inf" and rows["paged"]["slots"] == "-"
    assert rows["fp8"]["vs baseline"] == "not comparable" and rows["fp8"]["n"] == "1"
    assert rows["llama"]["output tok/s"] == "not_run: needs 810 GB, has 141 GB"


def test_the_table_tells_how_many_pairs_each_ratio_has(tmp_path: Path) -> None:
    plans = {"static": {}, "continuous": {"versus": "static"}, "paged": {"versus": "continuous"}}
    write_json(tmp_path / "study.json", {"arms": plans})
    for arm, trials in {"static": 3, "continuous": 1, "paged": 3}.items():
        for trial in range(trials):
            record(tmp_path, arm, trial, 10.0)
    rows = {row["arm"]: row["n"] for row in table_rows(summarize(tmp_path))}
    assert rows == {"static": "3", "continuous": "1", "paged": "3 / 1"}


def test_the_table_tells_no_pair_from_no_comparison(tmp_path: Path) -> None:
    write_json(tmp_path / "study.json", {"arms": {"first": {}, "idle": {}, "other": {}, "later": {}}})
    record(tmp_path, "first", 0, 10.0)
    record(tmp_path, "idle", 0, 0.0)  # not one token: no ratio
    record(tmp_path, "other", 0, 20.0, emulated=["fp8"])
    record(tmp_path, "later", 1, 20.0)  # no trial of the baseline's number
    rows = {row["arm"]: row["vs baseline"] for row in table_rows(summarize(tmp_path))}
    assert rows == {"first": "baseline", "idle": "-", "other": "not comparable", "later": "-"}


def test_an_option_of_the_traffic_that_is_off_is_as_one_that_was_not_there_yet() -> None:
    def run(**workload: Any) -> dict[str, Any]:
        traffic = {"name": "chat", "sampling": {"temperature": 0.0}, **workload}
        return {"provenance": {}, "config": {"workload": traffic}, "seed": 0, "clock": "real", "emulated": []}

    off = run(priority_shares=[], path=None, sampling={"temperature": 0.0, "stop_token_ids": []})
    assert incomparable(run(), off) == []
    assert incomparable(run(), run(priority_shares=[0.5, 0.5])) == ["traffic differs"]
    assert incomparable(run(), run(sampling={"temperature": 0.0, "stop_token_ids": [7]})) == ["traffic differs"]


def test_workers_of_other_hosts_are_part_of_the_machine() -> None:
    def run(*workers: dict[str, Any]) -> dict[str, Any]:
        named = {f"decode{i}": {"hardware": hardware, "clock_error_s": i} for i, hardware in enumerate(workers)}
        provenance: dict[str, Any] = {"hardware": {"cpu": "a"}, **({"workers": named} if named else {})}
        return {"provenance": provenance, "config": {}, "seed": 0, "clock": "real", "emulated": []}

    fast, slow = {"cpu": "b"}, {"cpu": "c"}
    assert incomparable(run(), run()) == incomparable(run(fast, slow), run(slow, fast)) == []
    for other in (run(), run(slow), run(fast, fast)):
        assert incomparable(run(fast), other) == ["machine differs"]


def test_what_an_inline_trial_cannot_know_of_itself_is_missing_everywhere(tmp_path: Path) -> None:
    """`isolation=inline`: start-up and peak memory would be the parent's, so they are null: never 0, never a figure."""
    known = {"startup_s": 5.0, "peak_memory_bytes": 512e6}
    unknown: dict[str, Any] = dict.fromkeys(known)
    write_json(tmp_path / "study.json", {"arms": {"child": {}, "inline": {}}})
    for trial in range(3):
        record(tmp_path, "child", trial, 10.0, metrics={"output_tokens_per_s": 10.0, **known})
        record(tmp_path, "inline", trial, 10.0, metrics={"output_tokens_per_s": 20.0, **unknown})
    summary = summarize(tmp_path)
    inline = summary["arms"]["inline"]
    assert {name: inline["metrics"][name] for name in known} == unknown
    missing = {**dict.fromkeys(("median", "low", "high")), "n": 0, "verdict": "no difference shown"}
    assert [inline["ratios"][name] for name in known] == [missing, missing]
    assert inline["ratios"]["output_tokens_per_s"]["median"] == pytest.approx(2.0)
    assert [row["peak memory"] for row in table_rows(summary)] == ["512 MB", "-"]
    page = html.unescape(build(tmp_path).read_text("utf-8"))
    for name, value in known.items():
        assert f'data-value="{value}" data-source="["child", "metrics", "{name}"]"' in page
        assert not re.search(rf'data-value="[^"]*" data-source="\["inline", "metrics", "{name}"', page)
    assert '<td class="num" data-source="["inline", "metrics", "peak_memory_bytes"]">\N{EN DASH}</td>' in page
