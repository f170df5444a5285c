"""The dashboard: one HTML file made from a run's records and their summary alone."""

from __future__ import annotations

import os
from pathlib import Path


def build(run_dir: Path) -> Path:
    """Write `report.html` beside the records, whole or not at all. RecordError if a record cannot be read."""
    from harness.report.data import load
    from harness.report.page import render

    path = run_dir / "report.html"
    text = render(load(run_dir))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, "utf-8", errors="replace")  # a lone surrogate in a name must not cost the report
    os.replace(temporary, path)
    return path
