"""What is driven, and what a step of it gave: `Target`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from impls.request import Request
from impls.seams.kv_cache import KVReservation


@dataclass(frozen=True)
class Emission:
    """Tokens of one request, with the time at which they left the engine. ``finish_reason`` is set on the last: length,
    stop, error, truncated, aborted or rejected.
    """

    request_id: str
    token_ids: tuple[int, ...]
    time_s: float
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class DraftForward:
    """One forward of a drafting model: rows and K/V lengths by sequence, one row of logits each.

    model, num_layers: as `ModelRunner.draft_forward` takes them. gathered_bytes: the backend's, of all layers.
    """

    model: str
    num_layers: int | None
    query_lens: list[int]
    kv_lens: list[int]
    gathered_bytes: int = 0


@dataclass
class StepStats:
    """One row of steps.parquet before the recorder numbers it and splits the KV parts. Times: seconds of the clock."""

    start_s: float
    end_s: float = 0.0
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    propose_s: float = 0.0
    commit_s: float = 0.0
    swap_s: float = 0.0  # between schedule and prepare: copying blocks to host memory, back, or to other blocks
    copied_blocks: int = 0  # to other blocks: begun as copies, on the first write
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    swapped_out: int = 0  # of the preempted, those whose keys and values are kept in host memory
    swap_kept_bytes: int = 0  # kept there when the step ends
    worker: str | None = None  # whose step it was, where a topology has several
    prefill_only: bool = False  # of a worker that ends every request with its first token
    transfers: dict[str, tuple[int, float]] = field(default_factory=dict)  # K/V copied from a worker: bytes, seconds
    attention_s: float | None = None  # the part of forward_s in which layers store K/V and attend; None: not known
    replayed: bool = False  # was its forward pass the replay of a captured graph?
    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    dead_rows: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    slot_request_ids: list[str | None] = field(default_factory=list)
    scheduled: list[str] = field(default_factory=list)  # requests with live rows in this step
    preempted_ids: list[str] = field(default_factory=list)
    drafted: dict[str, tuple[int, int]] = field(default_factory=dict)  # request -> (drafted, accepted) in this step
    cached_prompt_tokens: dict[str, int] = field(default_factory=dict)  # of requests that run for the first time
    kv_capacity_tokens: int = 0
    kv_free_tokens: int = 0  # capacity not held by any sequence
    kv_shared_tokens: int = 0  # held by several: each counted once less than it has holders
    kv_allocation_unit: int = 1  # tokens in a block
    kv_reservations: list[KVReservation] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)  # rows per sequence, padding and dead rows included
    kv_lens: list[int] = field(default_factory=list)
    num_logits_rows: int = 0
    gathered_bytes: int = 0
    draft_forwards: list[DraftForward] = field(default_factory=list)  # in order, by what drafted at this step's end


@dataclass
class StepResult:
    """What `step` gave; ``stats`` is None if no step of ours ran (idle until ``until``, or a remote server)."""

    emissions: list[Emission] = field(default_factory=list)
    stats: StepStats | None = None


class Target(Protocol):
    """Anything that can be driven: our engine, transformers, a remote server."""

    def add_request(self, request: Request) -> None:
        """One sample of a request (`Request.samples`)."""

    def step(self, until: float) -> StepResult:
        """Run one step, or wait (at most until the clock shows ``until``) if nothing can run."""

    @property
    def has_work(self) -> bool: ...

    def abort(self, request_id: str) -> None: ...

    def close(self) -> None: ...


class ForeignTarget(Target, Protocol):
    """A target in this process that is not our engine, and what a trial's record says of it."""

    max_model_len: int
    weights_bytes: int

    @property
    def kernels(self) -> Mapping[str, str]:
        """What computes: linear, head and attention at least."""
