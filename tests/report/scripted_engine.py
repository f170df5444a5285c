"""A small engine that follows a script in virtual time: times are computed, never measured. Same seed, same steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from impls.request import Request, SamplingParams
from impls.seams import Emission, KVReservation, StepResult, StepStats

BUDGET_TOKENS, MAX_MODEL_LEN, BLOCK = 3072, 768, 16


@dataclass(frozen=True)
class ArmPlan:
    """One arm of the script; ``speed`` scales the time of a row, ``drafts`` is the number of tokens drafted."""

    name: str
    batching: str = "continuous"
    kv_cache: str = "paged"
    max_num_seqs: int = 32
    drafts: int = 0
    speed: float = 1.0
    precision: str = "bf16"
    kv_dtype: str = "auto"
    versus: str | None = None
    emulated: tuple[str, ...] = ()

    @property
    def budget_tokens(self) -> int:
        """Positions of one byte a value are half as large."""
        return BUDGET_TOKENS * (2 if self.kv_dtype in ("int8", "fp8") else 1)


LADDER = (
    ArmPlan("static", "static", "contiguous", 4),
    ArmPlan("continuous", "continuous", "contiguous", 4, versus="static"),
    ArmPlan("paged", versus="continuous"),
    ArmPlan("speculative", drafts=4, versus="paged"),
    ArmPlan("int8", speed=0.8, precision="int8", versus="paged"),
    ArmPlan("fp8", speed=6.0, precision="fp8", versus="paged", emulated=("fp8 rounds to E4M3 and computes in BF16",)),
)


@dataclass
class Live:
    """A request that has a slot: ``done`` tokens of its output exist."""

    request: Request
    slot: int
    done: int = 0
    finished: bool = False

    @property
    def written(self) -> int:
        return len(self.request.prompt_token_ids) + max(0, self.done - 1)


@dataclass
class Engine:
    """Steps through requests by the arm's policy. Times are computed, never measured."""

    plan: ArmPlan
    rng: np.random.Generator
    pace: float
    waiting: list[Request]
    live: list[Live] = field(default_factory=list)
    now: float = 0.01

    def reserved(self, live: Live) -> int:
        tokens = MAX_MODEL_LEN if self.plan.kv_cache == "contiguous" else -(-(live.written + 1) // BLOCK) * BLOCK
        return tokens

    @property
    def free(self) -> int:
        return self.plan.budget_tokens - sum(self.reserved(live) for live in self.live)

    def admit(self) -> list[Live]:
        """Static fills an empty batch only; the others join whenever a slot and memory are there."""
        if self.plan.batching == "static" and self.live:
            return []
        joined = []
        while self.waiting and len(self.live) < self.plan.max_num_seqs:
            taken = {live.slot for live in self.live}
            slot = next(slot for slot in range(self.plan.max_num_seqs) if slot not in taken)
            candidate = Live(self.waiting[0], slot)
            room = BLOCK * len(self.live) if self.plan.kv_cache == "paged" else 0  # to grow by
            if self.reserved(candidate) + room > self.free:
                break
            self.waiting.pop(0)
            self.live.append(candidate)
            joined.append(candidate)
        return joined

    def step(self) -> StepResult:
        joined = self.admit()
        longest = max((len(live.request.prompt_token_ids) for live in joined), default=0)
        padding = sum(longest - len(j.request.prompt_token_ids) for j in joined)
        padding = padding if self.plan.batching == "static" else 0
        prefill = sum(len(live.request.prompt_token_ids) for live in joined)
        decoding = [live for live in self.live if live.done and not live.finished]
        dead = [live for live in self.live if live.finished]
        drafted = {live.request.request_id: self.accept() for live in decoding} if self.plan.drafts else {}
        rows = prefill + padding + len(decoding) * (1 + self.plan.drafts) + len(dead)
        forward = self.pace * self.plan.speed * (0.011 + 0.00042 * rows)
        stats = StepStats(
            start_s=self.now,
            end_s=self.now + forward + 0.0011,
            schedule_s=0.00005,
            prepare_s=0.0003,
            forward_s=forward,
            attention_s=0.25 * forward,
            sample_s=0.0004,
            propose_s=0.0001 if self.plan.drafts else 0.0,
            commit_s=0.0001,
            prefill_tokens=prefill,
            decode_tokens=len(decoding),
            padding_tokens=padding,
            dead_rows=len(dead),
            draft_tokens=sum(d for d, _ in drafted.values()),
            accepted_tokens=sum(a for _, a in drafted.values()),
            running=len(self.live) - len(dead),
            waiting=len(self.waiting),
            slot_request_ids=self.slots(),
            scheduled=[live.request.request_id for live in self.live if not live.finished],
            drafted=drafted,
            kv_capacity_tokens=self.plan.budget_tokens,
            kv_free_tokens=self.free,
            kv_allocation_unit=MAX_MODEL_LEN if self.plan.kv_cache == "contiguous" else BLOCK,
            kv_reservations=[
                KVReservation(live.request.request_id, self.reserved(live), live.written, live.finished)
                for live in self.live
            ],
            query_lens=[1] * len(self.live),
            kv_lens=[live.written for live in self.live],
        )
        emissions = [self.emit(live, drafted, stats.end_s - 0.0005) for live in self.live if not live.finished]
        self.now = stats.end_s + 0.0001
        if self.plan.batching != "static" or all(live.finished for live in self.live):
            self.live = [live for live in self.live if not live.finished]
        return StepResult(emissions, stats)

    def accept(self) -> tuple[int, int]:
        """(drafted, accepted): each draft is accepted with probability 0.6, up to the first that is not."""
        misses = np.flatnonzero(self.rng.random(self.plan.drafts) >= 0.6)
        return self.plan.drafts, int(misses[0]) if len(misses) else self.plan.drafts

    def emit(self, live: Live, drafted: Mapping[str, tuple[int, int]], time_s: float) -> Emission:
        left = live.request.sampling.max_tokens - live.done
        count = min(left, 1 + drafted.get(live.request.request_id, (0, 0))[1])
        tokens = tuple(7 + (live.done + i) * 31 % 997 for i in range(count))
        live.done += count
        live.finished = count == left
        return Emission(live.request.request_id, tokens, time_s, "length" if live.finished else None)

    def slots(self) -> list[str | None]:
        slots: list[str | None] = [None] * self.plan.max_num_seqs
        for live in self.live:
            slots[live.slot] = live.request.request_id
        return slots


def burst(seed: int, count: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(32, 97, count)
    outputs = np.clip(rng.exponential(48, count).astype(int) + 1, 1, 192)
    return [
        Request(f"request-{i}", tuple(range(int(p))), SamplingParams(max_tokens=int(o), ignore_eos=True))
        for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
