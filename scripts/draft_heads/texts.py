"""What the training prompts are about: docstrings and functions of Python's standard library, which every Python has.

Python's help topics, which the measured workloads read (`workloads.corpus.prose_passages`), are left out entirely, so
that whatever is measured on `workload=chat` or `workload=summarize` is text that no head was trained on.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_CHARS, MAX_CHARS = 240, 1500
LEFT_OUT = {"test", "tests", "idle_test", "pydoc_data", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
HELD_OUT_SHARE = 16  # one passage in so many chooses the checkpoint instead of training it


@dataclass(frozen=True)
class Passage:
    """A piece of natural text that a prompt asks about."""

    kind: str  # prose | code
    text: str

    @property
    def held_out(self) -> bool:
        """Decided by the text itself, so that it is held out whatever order and Python it comes with."""
        return hashlib.sha256(self.text.encode()).digest()[0] % HELD_OUT_SHARE == 0


def stdlib_passages() -> list[Passage]:
    """Distinct passages, in the order of the files' names."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, Passage] = {}
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            for passage in _passages_of(path.read_text(encoding="utf-8", errors="replace")):
                found.setdefault(passage.text, passage)
    return list(found.values())


def _passages_of(source: str) -> Iterator[Passage]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates and files for other versions
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = inspect.cleandoc(ast.get_docstring(node) or "")
            yield from (Passage("prose", piece) for piece in _pieces(text))
        if isinstance(node, ast.FunctionDef):
            code = inspect.cleandoc("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if MIN_CHARS <= len(code) <= MAX_CHARS:
                yield Passage("code", code)


def _pieces(text: str) -> Iterator[str]:
    """Cut at blank lines into pieces of at least half of MAX_CHARS, what is left over joined to the last."""
    pieces: list[str] = []
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= MAX_CHARS // 2:
            pieces.append(piece)
            piece = ""
    if piece and (not pieces or len(piece) >= MIN_CHARS):
        pieces.append(piece)
    return (kept for kept in (piece.strip() for piece in pieces) if len(kept) >= MIN_CHARS)
