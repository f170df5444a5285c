"""Errors in one line: bad input with its option, value, what is allowed and the nearest choice; a trial's failure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from hydra.errors import OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from harness.host_memory import host_memory
from harness.texts import one_line

LONGEST = 500  # characters of what an error says of itself


class BadInput(ValueError):
    """The user's mistake, said in one line; exit status 2."""


def failure(error: Exception) -> str:
    """Why a trial failed, in one line; where the host's memory is out, with what was free (CUDA says so itself)."""
    said = one_line(f"{type(error).__name__}: {error}")[:LONGEST]
    if not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in said:
        return said
    memory = host_memory()
    return f"{said} (the host has {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free)"


def nearest(value: str, allowed: Iterable[str]) -> str | None:
    """The allowed choice that ``value`` most probably meant; None if nothing is close."""
    matches = difflib.get_close_matches(value, list(allowed), n=1, cutoff=0.5)
    return matches[0] if matches else None


def not_allowed(option: str, value: str, allowed: Iterable[str], what: str = "allowed") -> BadInput:
    """``option=value`` names something that does not exist; ``what`` says what the listed names are."""
    choices = sorted(allowed)
    hint = nearest(value, choices)
    said = f"{option}={value}" if option else value
    meant = f"; did you mean {hint}?" if hint else ""
    return BadInput(f"{said}: {what}: {', '.join(choices) or 'nothing'}{meant}")


def explain(error: Exception) -> BadInput:
    """What Hydra or OmegaConf raised while composing, as one line."""
    causes = list(_chain(error))
    for cause in causes:
        if isinstance(cause, BadInput):
            return cause
        if isinstance(cause, OverrideParseException):
            return BadInput(
                f"{cause.override}: not an option; allowed: group=choice or key=value, quoted for the shell"
            )
        if isinstance(cause, InterpolationResolutionError):
            where = str(getattr(cause, "full_key", None) or "interpolation")
            return BadInput(f"{where}: {one_line(str(cause).splitlines()[0])}; allowed: a plain value")
        if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
            return unknown_key(str(cause.full_key), _keys(cause))
    messages = [one_line(str(cause)) for cause in causes if isinstance(cause, OmegaConfBaseException) or str(cause)]
    return BadInput(": ".join(dict.fromkeys(messages)))


def unknown_key(key: str, siblings: Iterable[str]) -> BadInput:
    """An option that is none, with its ``siblings`` that a command line can set and the nearest of them."""
    parent, _, leaf = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    fixed = {leaf, "_target_"} | ({"name"} if parent != "study" else set())  # what no command line can set
    return not_allowed("", key, [prefix + name for name in siblings if name not in fixed], "no such option; allowed")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _keys(error: OmegaConfBaseException) -> list[str]:
    node = error.parent_node
    return [str(key) for key in node] if node is not None and hasattr(node, "keys") else []
