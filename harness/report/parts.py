"""What a page is made of: cells, tables, charts. Plain data; `tables` and the template turn it into HTML, escaped."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness import texts

MISSING = "\u2013"
LEGEND_ABOVE = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"}


@dataclass(frozen=True)
class Cell:
    """``text`` is shown, ``value`` is the figure in full, ``source`` its keys in summary.json under `arms`.

    ``follows``: what the page puts in its place where a reader chooses another baseline (`harness.report.against`).
    """

    text: str
    value: float | None = None
    source: tuple[str, ...] = ()
    numeric: bool = True
    style: str = ""
    follows: str = ""


@dataclass(frozen=True)
class Table:
    """``columns`` carry their units."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Chart:
    """A Plotly figure with its words and numbers. Without ``traces`` the page says no more of it than ``empty``.

    ``wide``: it goes across the page, with no other beside it.

    ``title`` and ``note`` are plain text; strings inside ``traces`` and ``layout`` that come from records have gone
    through `label`. A value "@name" under a colour key stands for the page's CSS colour ``--name``.
    """

    key: str
    title: str
    note: str
    table: Table
    traces: Sequence[dict[str, Any]] = ()
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 340
    empty: str = ""
    wide: bool = False

    @property
    def spec(self) -> str:
        """JSON that may stand inside a script element: no character of it can close the element."""
        figure = {"data": list(self.traces), "layout": {**self.layout, "height": self.height}}
        try:
            text = json.dumps(figure, allow_nan=False, separators=(",", ":"))
        except ValueError:  # rare: a chart has taken a missing value over as it is
            text = json.dumps(_finite(figure), allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """With null for every number that JSON has no name for."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def label(text: object, longest: int = 60) -> str:
    """A string from a record for use inside a figure, where Plotly reads markup: as typed, and not over-long."""
    shown = str(text)
    return html.escape(shown if len(shown) <= longest else f"{shown[: longest - 1]}\u2026", quote=False)


def floats(values: Iterable[Any], digits: int = 5) -> list[float | None]:
    """For a figure: rounded, None for what is missing or infinite."""
    numbers = (math.nan if value is None else float(value) for value in values)
    return [round(number, digits) if math.isfinite(number) else None for number in numbers]


# --- texts of numbers -------------------------------------------------------------------------------------------------


number = partial(texts.number, missing=MISSING)
percent = partial(texts.percent, missing=MISSING)
times = partial(texts.times, missing=MISSING)


def fixed(digits: int, scale: float = 1.0) -> Callable[[float | None], str]:
    """`number` with these digits and this scale."""
    return lambda value: number(value, digits, scale)


def counted(count: int, what: str) -> str:
    """`1 slot`, `1,024 slots`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def byte_size(value: float | None) -> str:
    """`1.5 GB`, in powers of 1,000."""
    if value is None or not math.isfinite(value):
        return number(value)
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:,.{1 if value < 100 * size else 0}f} {unit}"
    return f"{value:,.0f} B"


def text_cell(text: object) -> Cell:
    return Cell(MISSING if text is None or text == "" else str(text), numeric=False)


def number_cell(value: float | None, digits: int = 2, scale: float = 1.0) -> Cell:
    return Cell(number(value, digits, scale), value)


def percent_cell(value: float | None) -> Cell:
    return Cell(percent(value), value)
