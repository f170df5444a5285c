"""What the router and its workers say to each other. Plain data: keys and values never travel this way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from impls.request import Request
from impls.seams import StepResult

# --- orders, to a worker ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submit:
    """Begin a request; a prefill worker ends it with its first token."""

    request: Request


@dataclass(frozen=True)
class Resume:
    """Go on with a request whose first ``token_ids`` another worker has made.

    The keys and values of its prompt lie in ``blocks`` of the worker ``source``, until a `Stepped` says that they were
    taken.
    """

    request: Request
    token_ids: tuple[int, ...]
    source: str
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Drop:
    """The request is not needed here (any more): give up whatever is held for it, which may be nothing."""

    request_id: str


@dataclass(frozen=True)
class Call:
    """Answer with ``function(engine)``, and with the number."""

    number: int
    function: Callable[[Any], Any]


Order = Submit | Resume | Drop | Call

# --- reports, from a worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HandOver:
    """A prompt is computed: these blocks hold its keys and values and stay as they are until the request is dropped."""

    request_id: str
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Stepped:
    """``obeyed``: how many orders, calls aside, the worker had followed before this step. ``taken``: requests whose
    keys and values have been copied here in this step. ``broken``: workers from which no more can be had, as was found
    out in this step, and why."""

    result: StepResult
    obeyed: int
    handed_over: tuple[HandOver, ...] = ()
    taken: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Of a `Call`; number 0, without a value, says that the engine is built."""

    number: int = 0
    value: Any = None


@dataclass(frozen=True)
class Failed:
    """The worker's last word: what its engine raised."""

    reason: str


Report = Stepped | Answer | Failed
