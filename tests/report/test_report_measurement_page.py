"""docs/measurement.md defines every figure that a trial's record has: a new one without a definition fails here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.metrics import compute_metrics
from harness.prefix_ceiling import prefix_context
from harness.records import REQUEST_SCHEMA, STEP_SCHEMA, TELEMETRY_SCHEMA, empty_frame, read_run
from harness.report.charts.verdict import METRICS

PAGE = (Path(__file__).parents[2] / "docs" / "measurement.md").read_text("utf-8")
DEFINITIONS = PAGE.partition("\n## Definitions\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `[^|]+` \|$", DEFINITIONS, re.MULTILINE)  # figures, what they are, tests
DEFINED = {name for figures, _ in ROWS for name in re.findall(r"`([^`]+)`", figures)}


def names(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Of all figures, parts of one included."""
    for name, value in metrics.items():
        yield name
        if isinstance(value, Mapping):
            yield from names(value)


def computed() -> list[str]:
    empty = (empty_frame(schema) for schema in (REQUEST_SCHEMA, STEP_SCHEMA, TELEMETRY_SCHEMA))
    _, metrics, _ = compute_metrics(*empty, window_rule="burst")
    return sorted(set(names(metrics)))


@pytest.mark.parametrize("name", computed())
def test_a_figure_of_a_record_is_defined(name: str) -> None:
    assert name in DEFINED


def test_figures_that_the_report_adds_and_shows_are_defined(ladder: Path) -> None:
    added = {name for trial in read_run(ladder).trials for name in prefix_context(trial)}
    shown = {part for name, *_ in METRICS for part in name.split(".")}
    assert added <= shown <= DEFINED


def test_a_name_that_the_page_only_mentions_or_that_is_part_of_another_is_not_defined() -> None:
    assert "`kept_rows`" in DEFINITIONS and "kept_rows" not in DEFINED
    assert "itl_s" in DEFINED and "itl" not in DEFINED


def test_every_row_is_read() -> None:
    assert len(ROWS) == DEFINITIONS.count("\n| ") - 1  # but its head
