"""A block that is resumed after a commit, an edit or an upgrade: a pair whose halves ran by different code says so."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
from test_summary import HARDWARE, record

from harness.console import warning_lines
from harness.records import read_run, write_json
from harness.report import build
from harness.report.compare import browser_data
from harness.report.compare_runs import compare_runs
from harness.report.data import load
from harness.summary import summarize

PLAN = {"baseline": "base", "arms": {"base": {}, "step": {"versus": "base"}, "top": {"versus": "step"}}}
OLD, NEW = "a" * 40, "b" * 40


def code(commit: str, dirty: bool = False, torch: str = "2.13.0") -> dict[str, Any]:
    return {"provenance": HARDWARE | {"git": {"commit": commit, "dirty": dirty}, "versions": {"torch": torch}}}


def study(run_dir: Path, *blocks: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """Of each block, by which code its arms were measured."""
    write_json(run_dir / "study.json", PLAN)
    for trial, provenances in enumerate(blocks):
        for speed, (arm, provenance) in enumerate(zip(PLAN["arms"], provenances, strict=True), 1):
            record(run_dir, arm, trial, 10.0 * speed, **provenance)
    return summarize(run_dir)


def test_pairs_of_another_commit_or_of_edited_files_are_a_warning_and_keep_their_ratios(tmp_path: Path) -> None:
    old, new, edited = code(OLD), code(NEW), code(OLD, dirty=True)
    summary = study(tmp_path, (old, old, old), (old, new, new), (old, old, edited), (old, new, new))
    step, top = (summary["arms"][arm]["warnings"] for arm in ("step", "top"))
    assert step == {"measured with different code: bbbbbbbbbb here, aaaaaaaaaa in base": [1, 3]}
    assert top == {
        "measured with different code: bbbbbbbbbb here, aaaaaaaaaa in base": [1, 3],
        **{
            f"measured with different code: aaaaaaaaaa with uncommitted changes here, aaaaaaaaaa in {arm}": [2]
            for arm in ("base", "step")
        },
    }
    assert summary["arms"]["base"]["warnings"] == {}
    assert summary["arms"]["top"]["ratios"]["output_tokens_per_s"]["median"] == pytest.approx(3.0)
    lines = list(warning_lines(summary))
    assert lines[0] == "warning: step measured with different code: bbbbbbbbbb here, aaaaaaaaaa in base (trial 1, 3)"
    assert len(lines) == 4
    page = html.unescape(build(tmp_path).read_text("utf-8"))
    assert "measured with different code" in page and "bbbbbbbbbb here, aaaaaaaaaa in base" in page


def test_blocks_of_different_code_are_no_matter_where_each_pair_is_of_one(tmp_path: Path) -> None:
    summary = study(tmp_path, *[(code(commit),) * 3 for commit in (OLD, NEW)])
    assert all(entry["warnings"] == {} for entry in summary["arms"].values())
    assert list(warning_lines(summary)) == []


def test_another_torch_gives_no_ratio_within_a_study(tmp_path: Path) -> None:
    old, new = code(OLD), code(OLD, torch="2.14.0")
    arms = study(tmp_path, (old, old, old), (old, new, new))["arms"]
    assert arms["step"]["ratios"]["output_tokens_per_s"]["verdict"] == "not comparable"
    assert arms["top"]["ratios"]["output_tokens_per_s"]["median"] is None
    assert arms["top"]["step_ratios"]["output_tokens_per_s"]["verdict"] == "better"  # both of each pair are of one
    data = json.loads(browser_data(load(tmp_path)))  # nor to another baseline that a reader chooses
    base, step, top = (arm["conditions"][1] for arm in data["arms"])
    assert (data["comparable"][base][step], data["comparable"][step][top]) == ("0", "1")


def test_two_runs_are_compared_across_an_upgrade(tmp_path: Path) -> None:
    """There it is what the ratios are about, and is listed as such."""
    for name, torch in (("a", "2.13.0"), ("b", "2.14.0")):
        study(tmp_path / name, *[(code(OLD, torch=torch),) * 3] * 2)
    found = compare_runs(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert [arm.reasons for arm in found] == [[]] * 3
    assert any("torch" in change for change in found[0].changes)
