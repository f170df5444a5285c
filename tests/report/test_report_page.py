"""The page as a file: whole, alone, honest about its numbers, and deaf to what names try to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
from page_reader import Page, strings
from simulated_run import HOSTILE, LADDER, ArmPlan, run_record, write_many, write_measured, write_plan, write_run

from harness.records import decode_numbers, read_json, write_trial
from harness.report import build
from harness.report.__main__ import main
from harness.report.charts.verdict import metrics_table, rows
from harness.report.data import load
from harness.report.parts import MISSING
from harness.summary import summarize

CHARTS = {
    "slots",
    "kv",
    "tradeoff",
    "steptime",
    "decode",
    "linear",
    "ttft",
    "itl",
    "e2e",
    "speculation",
    "speedup",
    "telemetry",
    "roofline",
    "precision",
    "gantt",
}
OF_SOME_ARMS = {"speculation", "speedup", "linear", "precision"}  # those that draft, those that quantise
MOST_BYTES = 5_000_000


def look_up(summary: dict[str, Any], source: tuple[str, ...]) -> Any:
    found: Any = summary["arms"]
    for key in source:
        found = found[key]
    return found


def as_colours(node: Any) -> Any:
    """What the page's script does: a colour's name becomes a colour."""
    if isinstance(node, dict):
        return {key: as_colours(item) for key, item in node.items()}
    if isinstance(node, list):
        return [as_colours(item) for item in node]
    return "#123456" if isinstance(node, str) and node.startswith("@") else node


def test_a_ladder_has_every_chart_within_the_size(ladder: Path) -> None:
    page = Page(ladder / "report.html")
    assert set(page.specs) == CHARTS
    assert (ladder / "report.html").stat().st_size < MOST_BYTES
    for spec in page.specs.values():
        go.Figure(as_colours(spec))  # raises for anything that Plotly does not know


def test_every_figure_with_a_source_is_the_one_in_the_summary(ladder: Path) -> None:
    page, summary = Page(ladder / "report.html"), decode_numbers(read_json(ladder / "summary.json"))
    with_value = [cell for cell in page.cells if cell[1] is not None]
    assert len(with_value) > 300
    for source, value, _ in page.cells:
        assert look_up(summary, source) == value, source


def test_what_a_reader_sees_of_the_headline_is_the_summary_rounded(ladder: Path) -> None:
    page, summary = Page(ladder / "report.html"), decode_numbers(read_json(ladder / "summary.json"))
    for arm in summary["arms"]:
        metrics = summary["arms"][arm]["metrics"]
        shown = {source[2]: text for source, _, text in page.cells if source[:2] == (arm, "metrics")}
        assert shown["acceptance_rate"] == (
            "\u2013" if metrics["acceptance_rate"] is None else f"{100 * metrics['acceptance_rate']:.1f} %"
        )
        first = next(text for source, _, text in page.cells if source == (arm, "metrics", "output_tokens_per_s"))
        assert first.startswith(f"{metrics['output_tokens_per_s']:,.1f}")
    ratio = summary["arms"]["paged"]["step_ratios"]["output_tokens_per_s"]
    said = next(t for s, _, t in page.cells if s == ("paged", "step_ratios", "output_tokens_per_s", "median"))
    assert f"{ratio['median']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]" in said
    assert f"n {ratio['n']}" in said and ratio["verdict"] in said and "vs continuous" in said


def test_a_percentile_comes_with_the_number_of_its_values(ladder: Path) -> None:
    report = load(ladder)
    told = {(row[0].text, row[1].text.split(" ")[0]): row[-1] for row in metrics_table(report).rows}
    paged = next(arm for arm in report.arms if arm.name == "paged")
    counts = {name: cell.value for (arm, name), cell in told.items() if arm == "paged"}
    assert counts["ttft_s.p99"] == counts["e2e_s.p50"] == paged.metrics["ttft_s.n"] != counts["itl_s.p99"]
    assert counts["itl_s.p99"] == paged.metrics["itl_s.n"] and counts["output_tokens_per_s"] is None
    assert {name for name, count in counts.items() if count} == {name for name in counts if ".p" in name}


def test_where_no_pair_is_left_there_is_no_verdict(tmp_path: Path) -> None:
    plans = (ArmPlan("one"), ArmPlan("silent"))
    write_plan(tmp_path, plans, 2, 4)
    for trial in range(2):
        write_measured(tmp_path, "ladder", plans[0], trial, 4)
        write_measured(tmp_path, "ladder", plans[1], trial, 4, {"output_tokens_per_s": 0.0})
    report = load(tmp_path)
    headline = rows(report)[1].baseline
    assert (headline.text, headline.said, headline.n) == (MISSING, MISSING, 0)
    cells = {(row[0].text, row[1].text): [cell.text for cell in row[3:6]] for row in metrics_table(report).rows}
    assert cells["silent", "output_tokens_per_s (tok/s)"] == [MISSING, "0", MISSING]
    assert cells["silent", "peak_memory_bytes (MB)"] == ["1.00x [1.00, 1.00]", "2", "\u2248 no difference shown"]
    said = [text for source, _, text in Page(build(tmp_path)).cells if source[:2] == ("silent", "ratios")]
    assert MISSING in said[0] and "n 0" in said[0] and "difference" not in said[0]


def test_conditions_alone_are_a_reason_for_no_comparison(ladder: Path) -> None:
    said = [text for source, _, text in Page(ladder / "report.html").cells if source[:2] == ("fp8", "ratios")]
    assert MISSING in said[0] and "\u2205 not comparable" in said[0]


def test_it_needs_nothing_but_itself(ladder: Path) -> None:
    page = Page(ladder / "report.html")
    for tag, attributes in page.tags:
        assert tag not in ("iframe", "object", "embed", "base", "img"), tag
        for name in ("src", "href", "action", "srcset", "poster"):
            assert attributes.get(name) in (None, "data:,"), (tag, attributes)
    style = (Path(build.__code__.co_filename).parent / "assets" / "report.css").read_text()
    script = (Path(build.__code__.co_filename).parent / "assets" / "report.js").read_text()
    for call in ("url(", "@import", "fetch(", "XMLHttpRequest", "http:", "https:"):
        assert call not in style + script
    assert "showSendToCloud: false" in script


def test_conditions_and_badges_stand_at_the_top(ladder: Path) -> None:
    text = Page(ladder / "report.html").text
    top = text[: text.index("Verdict")]
    for condition in ("scripted_135m", "Scripted CPU", "70.8 MB", "uniform(low 32, high 96)", "burst", "0123456789"):
        assert condition in top, condition
    assert text.count("emulated") >= 2 and "measured" in text
    assert "p99 of fewer than 100 values" in text and "repetitive output" in text


def test_the_same_records_give_the_same_bytes_and_no_torch_is_wanted_for_it(ladder: Path) -> None:
    before = (ladder / "report.html").read_bytes()
    code = "import sys; from harness.report.__main__ import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", code, str(ladder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "0 False", done.stderr
    assert (ladder / "report.html").read_bytes() == before
    assert not [path for path in ladder.iterdir() if path.name.endswith(".tmp")]


def test_hostile_names_stay_text(hostile: Path) -> None:
    raw = (hostile / "report.html").read_text("utf-8")
    page = Page(hostile / "report.html")
    assert [tag for tag, attributes in page.tags if tag == "img" or "onerror" in attributes] == []
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert len(scripts) == len(page.specs) + 3  # plotly.js packed, the trials' values, and ours
    assert "alert(1)</script>" not in raw
    assert page.text.count(HOSTILE) >= 5
    from_records = [text for spec in page.specs.values() for text in strings(spec) if "alert" in text]
    assert from_records and not [text for text in from_records if "<script" in text or "<img" in text]
    for source, value, _ in page.cells:
        assert look_up(decode_numbers(read_json(hostile / "summary.json")), source) == value


@pytest.mark.parametrize("num_arms", [0, 1])
def test_few_arms_render(num_arms: int, tmp_path: Path) -> None:
    write_run(tmp_path, LADDER[:num_arms], trials=1, num_requests=5)
    page = Page(build(tmp_path))
    assert ("This run has no arms" in page.text) == (num_arms == 0)
    assert set(page.specs) == (CHARTS - OF_SOME_ARMS if num_arms else set())


def test_a_plan_without_trials_renders(tmp_path: Path) -> None:
    write_plan(tmp_path, LADDER, 3, 5)
    page = Page(build(tmp_path))
    assert page.specs == {} and page.text.count("no trial recorded") == 1
    assert f"{len(LADDER)} arms" in page.text and ", ".join(plan.name for plan in LADDER) in page.text


def test_many_arms_stay_small(tmp_path: Path) -> None:
    page = Page(build(write_many(tmp_path, 65, 1, num_requests=4)))
    assert set(page.specs) == CHARTS
    assert (tmp_path / "report.html").stat().st_size < MOST_BYTES
    assert "the first 12 of 65 arms" in page.text and "the first 12 of 13 arms" in page.text
    looks = {(t["line"]["color"], t["line"]["dash"]) for t in page.specs["ttft"]["data"][:20]}
    assert len(looks) == 20  # colour and dash together tell them apart


def test_failures_and_arms_that_did_not_run_say_why(tmp_path: Path) -> None:
    plans = (LADDER[0], ArmPlan("huge"), ArmPlan("crash"), ArmPlan("halted"))
    write_plan(tmp_path, plans, 2, 5)
    write_measured(tmp_path, "ladder", plans[0], 0, 5)
    records = {
        ("huge", 0): {"status": "not_run", "reasons": ["needs 810 GB, has 141 GB"]},
        ("crash", 0): {"status": "failed", "reasons": ["out of memory"]},
        ("static", 1): {"status": "failed", "reasons": ["ended by signal 9"]},
    }
    by_name = {plan.name: plan for plan in plans}
    for (arm, trial), changes in records.items():
        write_trial(tmp_path / arm / str(trial), run_record("ladder", by_name[arm], trial, 5, **changes))
    write_measured(tmp_path, "ladder", plans[3], 0, 5, status="aborted", reasons=["stopped by the user"])
    text = Page(build(tmp_path)).text
    start = text.index("Before believing")
    notices = text[start : text.index("Occupancy", start)]
    for reason in ("out of memory", "ended by signal 9 (trial 1)", "stopped by the user"):
        assert reason in notices, reason
    assert "out of memory" in text[:start]  # in the arm's own row too
    assert "needs 810 GB, has 141 GB" in text[:start] and "needs 810 GB" not in notices  # no figure to doubt


def test_endless_and_missing_values_render(tmp_path: Path) -> None:
    """A trial of which every request failed: inf percentiles, no gaps, no KV, no telemetry."""
    write_run(tmp_path, LADDER[:2], trials=1, num_requests=5)
    run_path = tmp_path / "continuous" / "0"
    requests, steps = (pd.read_parquet(run_path / f"{name}.parquet") for name in ("requests", "steps"))
    requests["finish_reason"], requests["finished_s"] = "error", None
    requests["emission_times_s"], requests["emission_tokens"] = [[]] * len(requests), [[]] * len(requests)
    for column in ("kv_capacity_tokens", "kv_used_tokens", "propose_s", "flops"):
        steps[column] = None
    record = read_json(run_path / "run.json")
    record["metrics"]["ttft_s"] = {**dict.fromkeys(record["metrics"]["ttft_s"], "inf"), "n": 5}
    record["metrics"]["itl_s"] = {**dict.fromkeys(record["metrics"]["itl_s"]), "n": 0}
    record["metrics"]["output_tokens_per_s"] = float("nan")
    write_trial(tmp_path / "all failed" / "0", {**record, "arm": "continuous", "trial": 1}, requests, steps)
    (run_path / "run.json").unlink()  # what is left of that trial is no record
    page = Page(build(tmp_path))
    shown = [text for source, _, text in page.cells if source == ("continuous", "metrics", "ttft_s.p99")]
    assert shown and set(shown) == {"inf"}
    assert len(page.specs["kv"]["layout"]["annotations"]) == 1  # the other arm's panel alone
    assert page.specs["slots"]["data"]
    assert [trace["name"] for trace in page.specs["e2e"]["data"]] == ["static (n 5)"]


def test_bad_input_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study.json").write_text("{")
    for arguments in ([], ["a", "b"], ["--fast"], [str(tmp_path / "nowhere")], [str(tmp_path)]):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and captured.out == ""
    assert main(["--help"]) == 0 and "python -m harness.report <run_dir>" in capsys.readouterr().out


def test_values_that_no_run_records_are_drawn_as_missing_or_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, LADDER[:2], trials=1, num_requests=5)
    path = tmp_path / "continuous" / "0" / "steps.parquet"
    steps = pd.read_parquet(path)
    steps.assign(start_s=[None, *steps["start_s"][1:]]).to_parquet(path)
    assert main([str(tmp_path)]) == 0
    steps.assign(slot_request_ids=None).to_parquet(path)
    capsys.readouterr()
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: slot_request_ids is null somewhere") and error.count("\n") == 1


def test_a_hand_edited_record_is_one_line_and_a_fault_of_the_report_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, LADDER[:2], trials=1, num_requests=5)
    path = tmp_path / "continuous" / "0" / "run.json"
    whole = path.read_text()
    edited = json.loads(whole)
    edited["provenance"]["host_after"] = {"load_1m": [1.0]}
    path.write_text(json.dumps(edited))
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {path}: provenance.host_after.load_1m is list, expected a number\n"
    edited = json.loads(whole)
    del edited["window"]["rule"], edited["metrics"]["ttft_s"], edited["config"]["batching"]["max_num_seqs"]
    path.write_text(json.dumps(edited | {"decode_costs": [{}]}))
    assert main([str(tmp_path)]) == 0  # what was taken out is missing
    path.write_text(whole)
    monkeypatch.setattr("harness.summary.summarize", lambda run_dir, study: len(None))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        main([str(tmp_path)])


def test_a_report_is_replaced_whole_or_not_at_all(ladder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (ladder / "report.html").read_bytes()
    monkeypatch.setattr("harness.report.page.render", lambda report: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        build(ladder)
    assert (ladder / "report.html").read_bytes() == before


def test_the_summary_on_disk_is_what_the_page_was_made_from(ladder: Path) -> None:
    on_disk = json.dumps(decode_numbers(read_json(ladder / "summary.json")))
    assert json.dumps(summarize(ladder)) == on_disk
