"""Tables as HTML. Not by the template, which takes several times as long for a page of many thousand cells."""

from __future__ import annotations

import json
from typing import Protocol

from markupsafe import Markup, escape

from harness.report.parts import Cell, Table


class Figure(Protocol):
    """What a cell says of its number: ``value`` in full, and ``source``, its keys in summary.json."""

    @property
    def value(self) -> float | None: ...

    @property
    def source(self) -> tuple[str, ...]: ...


def attributes(figure: Figure) -> Markup:
    """With which a script of the page finds the figure again, and its place in summary.json."""
    value = "" if figure.value is None else f' data-value="{figure.value}"'
    source = f' data-source="{escape(json.dumps(figure.source))}"' if figure.source else ""
    return Markup(value + source)


def breakable(text: str, mark: str = "_") -> Markup:
    """An arm's name or, with the mark ".", its settings: a line may end behind each mark."""
    return escape(text).replace(mark, escape(mark) + Markup("<wbr>"))


def td(cell: Cell) -> Markup:
    style = f" {cell.style}" if cell.style else ""
    follows = f' data-follows="{escape(cell.follows)}"' if cell.follows else ""
    kind = "num" if cell.numeric else "text"
    return Markup(f'<td class="{kind}{style}"{attributes(cell)}{follows}>{escape(cell.text)}</td>')


def table(data: Table) -> Markup:
    """Headings stand over their numbers as these do: by the first row."""
    numeric = [cell.numeric for cell in data.rows[0]] if data.rows else [False] * len(data.columns)
    right_aligned = ' class="num"'
    head = "".join(
        f'<th scope="col"{right_aligned if right else ""}>{escape(column)}</th>'
        for column, right in zip(data.columns, numeric, strict=True)
    )
    body = "\n".join(f"<tr>{''.join(map(td, row))}</tr>" for row in data.rows)
    return Markup(
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
    )
