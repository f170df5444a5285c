"""Who runs in a step: `Scheduler`, and who can never run: `never_runs`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from impls.request import Request, Sequence
from impls.seams.arm import Arm
from impls.seams.kv_cache import KVCacheManager


@dataclass
class ScheduledStep:
    """Who runs in this step, in row order. Plain picklable data.

    num_scheduled_tokens: tokens per sequence that are computed (drafts included, padding not); dead rows are in here
        with the one position they recompute. padding_tokens: extra rows per sequence that only static batching pays.
    swapped_out: of those preempted, the blocks to be copied to host memory, in order of position, before anything is
        written in this step: they hold them no more. swapped_in: the blocks to copy them back to before the step runs.
    cached_tokens: of each sequence that joins in this step, the positions that `begin` (or `fork`) of the
        `KVCacheManager` found computed.
    copied_blocks: by sequence, the block that begins as a copy and the copy, (from, to), before the step runs: what it
        is about to write to, another one holds.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    padding_tokens: dict[str, int] = field(default_factory=dict)
    dead_rows: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    swapped_out: dict[str, tuple[int, ...]] = field(default_factory=dict)
    swapped_in: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    copied_blocks: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.num_scheduled_tokens


class Scheduler(ABC):
    """A pure policy over its queues and the cache's free space; knows no model and no tensor.

    ``running`` is in the order in which sequences joined; ``slots`` shows which sequence sits in which of the
    ``max_num_seqs`` rows (None = free), finished ones included for as long as they hold the row.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    emit: str = "step"  # or "batch_end": what a caller of a batch pipeline sees
    preemption: str = "recompute"  # or "swap": those that yield keep what they computed, in host memory

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        """Reasons why the arm cannot run with this option; empty if it can."""
        return []

    @abstractmethod
    def add(self, sequence: Sequence, now_s: float) -> None:
        """It waits from now on, be it new or begun elsewhere (`num_computed_tokens` > 0)."""

    @abstractmethod
    def schedule(self, now_s: float) -> ScheduledStep:
        """Decide the next step, allocating its cache space. Empty if nothing can run now (see `next_event_s`).

        A sequence in ``rejected`` can never run (reason as value) and has left the queues. A preempted one is back in
        ``waiting`` with its blocks freed and its drafts dropped; ``num_computed_tokens`` is 0, or unchanged if it is in
        ``swapped_out``.
        """

    @abstractmethod
    def finish(self, sequence: Sequence) -> bool:
        """The engine has set ``finish_reason``. True if the row's cache was freed, False if it is kept (static)."""

    @abstractmethod
    def abort(self, seq_id: str) -> None:
        """Remove a sequence wherever it is and free its blocks."""

    @abstractmethod
    def next_event_s(self, now_s: float) -> float | None:
        """When an empty `schedule` is worth repeating without a new arrival (a batch timeout); None: never."""

    @property
    @abstractmethod
    def running(self) -> Seq[Sequence]: ...

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Those that the next step will reject included."""

    @property
    @abstractmethod
    def slots(self) -> Seq[str | None]: ...


def never_runs(
    request: Request, max_model_len: int, kv: KVCacheManager, cache: str = "the whole KV cache"
) -> str | None:
    """Why nothing with these limits could ever run it, None if something can. ``cache``: how ``kv`` is named."""
    prompt, output = len(request.prompt_token_ids), request.sampling.max_tokens
    if request.sampling.n != 1:
        return f"n={request.sampling.n}: only one sample per request is supported"
    if prompt < 1 or output < 1:
        return f"needs a prompt and max_tokens, has {prompt} and {output}"
    what = f"prompt ({prompt}) + max_tokens ({output}) = {prompt + output} tokens"
    if prompt + output > max_model_len:
        return f"{what}, max_model_len is {max_model_len}"
    if kv.never_fits(prompt + output):
        return f"{what}, {cache} holds {kv.num_blocks * kv.block_size}"
    return None
