"""The engine without a model: what `schedule` decides is carried out on counters, and every promise is checked."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from impls.request import Request, SamplingParams, Sequence
from impls.seams import KVCacheManager, ScheduledStep, Scheduler


def request(request_id: str, prompt: int, output: int, arrival_s: float = 0.0, n: int = 1) -> Request:
    return Request(request_id, tuple(range(prompt)), SamplingParams(max_tokens=output, n=n), arrival_s)


def total_tokens(step: ScheduledStep) -> int:
    """Rows that the model computes in this step."""
    return sum(step.num_scheduled_tokens.values()) + sum(step.padding_tokens.values())


@dataclass
class Simulation:
    """Runs requests through a scheduler. Every step takes ``step_s``; ``drafts`` says how many the proposer offers."""

    scheduler: Scheduler
    kv: KVCacheManager
    step_s: float = 1.0
    seed: int = 0
    drafts: Callable[[np.random.Generator], int] = lambda rng: 0
    check: bool = True
    now_s: float = 0.0
    steps: list[ScheduledStep] = field(default_factory=list)
    live: dict[str, Sequence] = field(default_factory=dict)
    ended: dict[str, Sequence] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    first_scheduled: list[str] = field(default_factory=list)
    arrival: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def add(self, item: Request) -> Sequence:
        sequence = self.live[item.request_id] = Sequence(item)
        self.arrival[item.request_id] = len(self.arrival)
        self.scheduler.add(sequence, self.now_s)
        return sequence

    def run(self, requests: list[Request], max_steps: int = 20_000) -> None:
        """Until all have ended. AssertionError for a broken promise or no end in ``max_steps``."""
        arrivals = sorted(requests, key=lambda r: r.arrival_s)
        for _ in range(max_steps):
            while arrivals and arrivals[0].arrival_s <= self.now_s:
                self.add(arrivals.pop(0))
            if not arrivals and not self.live:
                assert self.kv.num_free_blocks == self.kv.num_blocks, "blocks leaked"
                assert self.scheduler.num_waiting == 0 and set(self.scheduler.slots) == {None}
                return
            if self.step().is_empty:
                wakes = [r.arrival_s for r in arrivals[:1]]
                event = self.scheduler.next_event_s(self.now_s)
                wakes += [] if event is None else [event]
                assert wakes or not self.live, "deadlock: nothing runs, nothing will wake the scheduler"
                self.now_s = max(self.now_s, min(wakes, default=self.now_s))
        raise AssertionError(f"starved after {max_steps} steps: {sorted(self.live)[:5]}")

    def until_preempted(self, max_steps: int = 100) -> ScheduledStep:
        """The first step that preempts somebody."""
        for _ in range(max_steps):
            if (step := self.step()).preempted:
                return step
        raise AssertionError(f"nobody was preempted in {max_steps} steps")

    def step(self) -> ScheduledStep:
        before = {s.seq_id: row for row, s in self._rows().items()}
        step = self.scheduler.schedule(self.now_s)
        for seq_id, reason in step.rejected.items():
            self.rejected[seq_id] = reason
            del self.live[seq_id]
        if self.check:
            self._check(step, before)
        self.carry_out(step)
        if step.is_empty:
            return step
        self.steps.append(pickle.loads(pickle.dumps(step)))
        assert self.steps[-1] == step
        self.now_s += self.step_s
        ran = {self.live[i]: n for i, n in step.num_scheduled_tokens.items() if i not in step.dead_rows}
        done = [sequence for sequence, count in ran.items() if self._advance(sequence, count)]
        for sequence in done:
            if sequence.num_tokens == sequence.max_total_tokens:
                sequence.finish_reason = "length"
                self.ended[sequence.seq_id] = self.live.pop(sequence.seq_id)
                self.scheduler.finish(sequence)
            else:
                offered = min(self.drafts(self.rng), sequence.max_total_tokens - sequence.num_tokens - 1)
                sequence.draft_token_ids = [0] * offered
        if self.check:
            self.kv.check_invariants()
        return step

    def carry_out(self, step: ScheduledStep) -> None:
        """What a model and its cache would do, for those that look at it."""

    def _advance(self, sequence: Sequence, count: int) -> bool:
        """The engine's part: count, verify, append, commit. False for a part that does not reach the sequence's end."""
        drafted = len(sequence.draft_token_ids)
        end = sequence.num_computed_tokens + count
        if end < sequence.num_tokens and not drafted:
            assert not self.scheduler.whole_prompts
            sequence.num_computed_tokens = end
            self.kv.commit(sequence.seq_id, end)
            return False
        assert end == sequence.num_tokens + drafted, "all that a sequence misses, and all its drafts"
        accepted = int(self.rng.integers(0, drafted + 1))
        sequence.draft_token_ids = []
        sequence.token_ids.extend([0] * (accepted + 1))
        sequence.num_computed_tokens = sequence.num_tokens - 1
        self.kv.commit(sequence.seq_id, sequence.num_computed_tokens)
        return True

    def _rows(self) -> dict[int, Sequence]:
        by_id = {s.seq_id: s for s in self.scheduler.running}
        return {row: by_id[i] for row, i in enumerate(self.scheduler.slots) if i is not None}

    def _check(self, step: ScheduledStep, before: dict[str, int]) -> None:
        scheduler, kv = self.scheduler, self.kv
        kv.check_invariants()
        assert total_tokens(step) <= scheduler.max_num_batched_tokens, "over max_num_batched_tokens"
        assert len(scheduler.slots) == scheduler.max_num_seqs
        rows = self._rows()
        assert len(rows) == len(scheduler.running) <= scheduler.max_num_seqs, "over max_num_seqs"
        assert set(step.num_scheduled_tokens) == {s.seq_id for s in rows.values()}, "whoever holds a row runs"
        order = [self.arrival[s.seq_id] for s in scheduler.running]
        assert order == sorted(order) or scheduler.order != "fcfs", "somebody overtook a preempted sequence"
        self._check_shares(step, [s for s in rows.values() if s.seq_id not in step.dead_rows])
        for row, sequence in rows.items():
            seq_id = sequence.seq_id
            if seq_id in before and seq_id not in step.preempted:
                assert before[seq_id] == row, "a sequence changed its row"
            if seq_id in step.dead_rows:
                assert sequence.finished and step.num_scheduled_tokens[seq_id] == 1
                continue
            assert seq_id in self.live and not sequence.finished
            end = sequence.num_computed_tokens + step.num_scheduled_tokens[seq_id]
            assert kv.reserved_tokens(seq_id) >= end + step.padding_tokens.get(seq_id, 0), "a position without a block"
            if seq_id not in self.first_scheduled:
                self.first_scheduled.append(seq_id)
        for seq_id in step.preempted:
            assert self.live[seq_id].preemptions > 0 and not self.live[seq_id].draft_token_ids
            if seq_id not in step.num_scheduled_tokens:
                computed, blocks = self.live[seq_id].num_computed_tokens, step.swapped_out.get(seq_id, ())
                assert computed == 0 or (len(blocks) - 1) * kv.block_size < computed <= len(blocks) * kv.block_size
                assert bool(blocks) <= (scheduler.preemption == "swap")
                assert blocks or scheduler.preemption == "recompute" or scheduler.max_swapped_tokens is not None

    def _check_shares(self, step: ScheduledStep, live: list[Sequence]) -> None:
        """Decodes lack nothing; a prompt is cut only to the budget's end, one at a time, and then nobody drafts."""
        scheduled = step.num_scheduled_tokens
        missing = {s.seq_id: s.num_tokens - s.num_computed_tokens for s in live}
        cut = [seq_id for seq_id in missing if scheduled[seq_id] < missing[seq_id]]
        if cut:
            assert not self.scheduler.whole_prompts and len(cut) == 1 and missing[cut[0]] > 1
            assert total_tokens(step) == self.scheduler.max_num_batched_tokens, "a prompt waits beside an idle budget"
            assert all(scheduled[s.seq_id] <= missing[s.seq_id] for s in live), "a draft displaces a required token"
