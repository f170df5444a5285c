"""Chunked prefill with stall-free batching (Sarathi-Serve, Agrawal et al. 2024); the default of vLLM's V1 engine."""

from __future__ import annotations

from impls.batching.continuous import ContinuousBatching
from impls.seams import ScheduledStep


class ChunkedPrefill(ContinuousBatching):
    """A step computes at most ``max_num_batched_tokens``: decodes first, then as much of the prompts as still fits.

    So the budget, not the longest prompt, bounds how long a step lasts, and with it the gap between two tokens of a
    sequence that decodes; it may be below max_model_len. A prompt that is computed in part keeps its row and its blocks
    (all that the prompt needs are taken when it joins) and goes on in the next step; nobody joins before it is done, so
    there is at most one, the last that joined. Drafts come last: they get what neither decodes nor prompts want.
    """

    whole_prompts = False

    def schedule(self, now_s: float) -> ScheduledStep:
        step = ScheduledStep(rejected=self._take_rejected())
        drafting = self._grow_running(step)
        budget = self._shorten_prompt(step.num_scheduled_tokens)
        if not step.preempted:
            budget = self._admit(step, budget)
        self._grant_drafts(drafting, step, budget)
        return step

    def _shorten_prompt(self, scheduled: dict[str, int]) -> int:
        """Cut what is over the budget off the last that joined; what is left of the budget.

        All before it lack one token each, and there are at most as many rows as tokens in the budget: it keeps one too.
        """
        budget = self.max_num_batched_tokens - sum(scheduled.values())
        if budget < 0:
            scheduled[next(reversed(scheduled))] += budget
        return max(0, budget)

    def _portion(self, missing: int, budget: int) -> int:
        return min(missing, budget)
