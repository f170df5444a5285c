"""The committed measurements say what today's harness makes of their records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.record_json import encode
from harness.records import read_run
from harness.summary import summary_of

RECORDS = Path(__file__).resolve().parents[2] / "results" / "reference"
STUDIES = sorted(path.parent for path in RECORDS.glob("*/*/study.json"))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    else:
        yield path, value


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_a_committed_summary_is_that_of_its_records(folder: Path) -> None:
    assert (folder / "summary.json").exists(), f"run python -m harness.report {folder}"
    committed = dict(leaves(json.loads((folder / "summary.json").read_text(encoding="utf-8"))))
    made = dict(leaves(encode(summary_of(read_run(folder)))))
    assert committed.keys() == made.keys(), f"run python -m harness.report {folder}"
    for path, value in made.items():
        expected = pytest.approx(value) if isinstance(value, float) else value  # another libm's last digit
        assert committed[path] == expected, f"{path}: run python -m harness.report {folder}"
