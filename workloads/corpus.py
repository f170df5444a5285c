"""Natural text that every Python carries: the language's help topics (prose) and the standard library (code)."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from pathlib import Path

from workloads.errors import WorkloadError
from workloads.tokenizer import Tokenizer

PASSAGE_CHARS = 1500
CODE_CHARS = 1_500_000  # of the standard library's 5 MB; enough to draw from, quick to read


class Corpus:
    """Passages of about ``PASSAGE_CHARS`` characters, encoded when first read. ``kind``: prose or code.

    The text differs between Python versions; ``fingerprint`` (SHA-256, 12 digits) goes into the record.
    """

    def __init__(self, kind: str, tokenizer: Tokenizer) -> None:
        self.passages = prose_passages() if kind == "prose" else code_passages()
        if not self.passages:
            raise WorkloadError(
                f"workload.prompts: this Python carries no {kind} to build prompts from; use prompts=random"
            )
        self.fingerprint = hashlib.sha256("\0".join(self.passages).encode()).hexdigest()[:12]
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_token_ids)
        self._encoded: dict[int, list[int]] = {}

    def read(self, start: int, skip: int, length: int) -> list[int]:
        """``length`` token ids of running text, from passage ``start`` on (the end joins the beginning), leaving out
        the first ``skip`` tokens.
        """
        out: list[int] = []
        index, empty = start % len(self.passages), 0
        while len(out) < skip + length:
            passage = self._passage(index)
            empty = 0 if passage else empty + 1
            if empty > len(self.passages):
                raise WorkloadError(
                    "workload.prompts: the tokenizer encodes the whole corpus to nothing; use prompts=random"
                )
            out += passage
            index = (index + 1) % len(self.passages)
        return out[skip : skip + length]

    def _passage(self, index: int) -> list[int]:
        if index not in self._encoded:
            ids = self._tokenizer.encode(self.passages[index])
            self._encoded[index] = [token for token in ids if token not in self._special]
        return self._encoded[index]


def prose_passages() -> list[str]:
    """Python's help topics; where they are not installed, the standard library's docstrings."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        texts = [match for source in _stdlib_sources() for match in re.findall(r'"""(.{400,}?)"""', source, re.DOTALL)]
    else:
        texts = [topics[name] for name in sorted(topics)]
    return [passage for text in texts for passage in _split(text)]


def code_passages() -> list[str]:
    return [passage for source in _stdlib_sources() for passage in _split(source)]


def _stdlib_sources() -> list[str]:
    sources, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if total >= CODE_CHARS:
            break
        sources.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(sources[-1])
    return sources


def _split(text: str) -> list[str]:
    """Cut at blank lines into pieces of at least ``PASSAGE_CHARS`` characters, the last one of what is left."""
    pieces, piece = [], ""
    for paragraph in text.strip().split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= PASSAGE_CHARS:
            pieces.append(piece)
            piece = ""
    return [*pieces, piece] if piece.strip() else pieces
