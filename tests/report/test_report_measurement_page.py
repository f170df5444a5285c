"""docs/measurement.md names every figure that a trial's record has: a new one without a definition fails here."""

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
NAMED = set(re.findall(r"`([^`]+)`", PAGE))


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
    assert name in NAMED


def test_figures_that_the_report_adds_and_shows_are_defined(ladder: Path) -> None:
    added = {name for trial in read_run(ladder).trials for name in prefix_context(trial)}
    shown = {part for name, *_ in METRICS for part in name.split(".")}
    assert added <= shown <= NAMED


def test_a_name_that_is_only_part_of_another_is_not_found() -> None:
    assert "itl_s" in NAMED and "itl" not in NAMED and "new_metric" not in NAMED
