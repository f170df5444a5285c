"""The dashboard: one HTML file made from a run's records and their summary alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.records import StudyRecord


def build(run_dir: Path, study: StudyRecord | None = None, summary: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` beside the records, whole or not at all. RecordError if a record cannot be read.

    study, summary: the run's records and what `summarize` gave, where they have been read and made already.
    """
    from harness.report.data import load
    from harness.report.page import render

    path = run_dir / "report.html"
    text = render(load(run_dir, study, summary))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, "utf-8", errors="replace")  # a lone surrogate in a name must not cost the report
    os.replace(temporary, path)
    return path
