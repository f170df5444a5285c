"""What each rule looks like when it is broken."""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """``text``, which occurs once in the file, becomes ``replacement``."""

    file: str
    text: str
    replacement: str
