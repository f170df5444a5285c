"""The one error of this room, and how it words itself."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class WorkloadError(ValueError):
    """Bad traffic input. One line: the option, its value, what is allowed and the nearest valid choice."""


def one_of(choices: Iterable[str], given: str) -> str:
    """'one of a, b (nearest: b)', the nearest left out where nothing is near."""
    known = sorted(choices)
    near = get_close_matches(given, known, n=1, cutoff=0.5)
    return f"one of {', '.join(known) or 'none'}" + (f" (nearest: {near[0]})" if near else "")
