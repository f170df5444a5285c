"""What a client asks for (immutable) and what the engine knows about it (two counters)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class SamplingParams:
    """How to decode one request.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off. ``seed`` keys the counter-based random numbers
    together with the request id, so a sample never depends on who shared the batch. ``n``: so many independent samples
    of one prompt (`Request.samples`).
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1


@dataclass(frozen=True)
class Request:
    """One client request. ``arrival_s`` is the *intended* arrival, in seconds since the run's start. A lower
    ``priority`` runs first, where the scheduler heeds it. ``parent_id``: the request of which this is one sample."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    arrival_s: float = 0.0
    session_id: str | None = None
    planned_cached_tokens: int = 0
    priority: int = 0
    parent_id: str | None = None

    def samples(self) -> list[Request]:
        """What is submitted for this request: one request for each of its ``n`` samples, which is itself where n is 1.

        Sample i is named ``<id>#<i>``. Its random numbers are keyed by that name, as those of any request are: it is
        the very sample that a request of that name would get alone. All but the first can find their prompt computed.
        """
        if self.sampling.n == 1:
            return [self]
        known = max(self.planned_cached_tokens, len(self.prompt_token_ids) - 1)
        return [
            replace(
                self,
                request_id=f"{self.request_id}#{i}",
                sampling=replace(self.sampling, n=1),
                planned_cached_tokens=known if i else self.planned_cached_tokens,
                parent_id=self.request_id,
            )
            for i in range(self.sampling.n)
        ]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in flight. A step lets ``num_computed_tokens`` catch up with ``num_tokens`` plus the drafts.

    There is no prefill or decode phase: a sequence whose counters differ by more than one has prompt (or, after a
    preemption, recomputed) positions to fill; one that differs by exactly one decodes. ``num_reserved_tokens`` is the
    scheduler's own: so many positions at least does the cache hold for it.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    preemptions: int = 0
    num_reserved_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.request.prompt_token_ids)

    @property
    def seq_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_total_tokens(self) -> int:
        """Its prompt and all that it may add."""
        return self.num_prompt_tokens + self.request.sampling.max_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
