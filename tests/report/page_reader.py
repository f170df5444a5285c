"""Reads a report the way a browser's parser does: elements, table cells and the charts' data."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

TEXT_CELLS = ("td", "th")


class Page(HTMLParser):
    """``cells``: (source, value, text) of each figure that names its place in summary.json; ``specs`` by chart."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[tuple[tuple[str, ...], float | None, str]] = []
        self.specs: dict[str, dict[str, Any]] = {}
        self.text = ""
        self._script: str | None = None
        self._cell: tuple[tuple[str, ...], float | None] | None = None
        self._cell_text = ""
        self.feed(path.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append((tag, named))
        if tag == "script":
            self._script = named.get("id") or ""
        if tag in TEXT_CELLS:
            source, value = named.get("data-source"), named.get("data-value")
            self._cell = (tuple(json.loads(source)), None if value is None else float(value)) if source else None
            self._cell_text = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None
        if tag in TEXT_CELLS and self._cell is not None:
            self.cells.append((*self._cell, self._cell_text.strip()))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
            self._cell_text += data
        elif self._script.startswith("spec-"):
            self.specs[self._script.removeprefix("spec-")] = json.loads(data, parse_constant=_refuse)


def _refuse(name: str) -> float:
    raise AssertionError(f"{name} in a chart's data")


def strings(node: Any) -> list[str]:
    """Every string inside JSON data, keys left out."""
    if isinstance(node, dict):
        return [text for item in node.values() for text in strings(item)]
    if isinstance(node, list):
        return [text for item in node for text in strings(item)]
    return [node] if isinstance(node, str) else []
