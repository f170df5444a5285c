"""docs/benchmarks.md: its figures are those of the record that it names, and every file of the suite has a row."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
RECORD = ROOT / "results" / "reference" / "cpu" / "scheduler.json"


def test_figures_are_those_of_the_record() -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    wanted = {
        test["name"]: (f"{1e6 * test['stats']['min']:,.0f}", f"{1e6 * test['extra_info']['target_s']:,.0f}")
        for test in record["benchmarks"]
        if "target_s" in test["extra_info"]
    }
    rows = re.findall(r"^\| [^|]+ \| `(test_\w+\[[\w-]+\])` \| ([\d,]+) us \| ([\d,]+) us \|$", PAGE, re.MULTILINE)
    assert {name: (best, target) for name, best, target in rows} == wanted and len(wanted) == 9


def test_every_file_of_the_suite_has_a_row() -> None:
    files = {path.name for path in (ROOT / "tests" / "benchmarks").glob("test_*.py")}
    assert set(re.findall(r"`(test_bench_\w+\.py)`", PAGE)) == files
