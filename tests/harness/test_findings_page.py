"""The tables of docs/findings.md are what the committed records say."""

from __future__ import annotations

import json

from scripts import findings


def test_the_page_is_what_its_records_give() -> None:
    text = findings.PAGE.read_text(encoding="utf-8")
    assert findings.BLOCK.search(text) and findings.page(text) == text, "run python -m scripts.findings"


def test_a_figure_is_the_records_own() -> None:
    folder = findings.RECORDS / "chunked"
    arm = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["arms"]["budget_64"]
    row = next(line for line in findings.table(folder).splitlines() if line.startswith("| budget_64 |"))
    found = arm["ratios"]["itl_s.p99"]
    assert f"| {found['median']:.2f}x [{found['low']:.2f}, {found['high']:.2f}] |" in row
    assert f"| {1e3 * arm['metrics']['itl_s.p99']:.0f} |" in row


def test_quality_has_the_interval_of_its_texts() -> None:
    folder = findings.RECORDS / "precision"
    found = json.loads((folder / "int4_b1" / "0" / "run.json").read_text(encoding="utf-8"))["quality"]["kl_vs_bf16"]
    row = next(line for line in findings.table(folder).splitlines() if line.startswith("| int4_b1 |"))
    assert f"| {found['value']:.4f} [{found['low']:.4f}, {found['high']:.4f}] |" in row


def test_every_study_of_the_page_has_records() -> None:
    named = [folder for _, folder, _ in findings.BLOCK.findall(findings.PAGE.read_text(encoding="utf-8"))]
    assert named and len(named) == len(set(named))
    assert {folder.partition(":")[0].rpartition("/")[2] for folder in named} <= set(findings.COLUMNS)
