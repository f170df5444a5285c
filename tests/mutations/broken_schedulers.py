"""The rules of who is admitted, preempted and computed, broken."""

from __future__ import annotations

from change import Change

QUEUES = "impls/batching/queues.py"
CONTINUOUS = "impls/batching/continuous.py"
CHUNKED = "impls/batching/chunked_prefill.py"
ORDER = "impls/batching/order.py"
STATIC = "impls/batching/static.py"
SAMPLES = "batching/test_samples.py::test_four_samples_by_hand"
BATCHING = "batching/test_continuous.py"
ORDERING = "batching/test_order_and_watermark.py"
CHUNKS = "batching/test_chunked_prefill.py"
SWAPS = "batching/test_swap.py"

SCHEDULERS: dict[str, tuple[Change, str]] = {
    "a step stays within its budget: prompts add up": (
        Change(
            CONTINUOUS,
            "            step.num_scheduled_tokens[seq_id] = count\n            budget -= count\n",
            "            step.num_scheduled_tokens[seq_id] = count\n",
        ),
        f"{BATCHING}::test_a_prompt_joins_exactly_to_the_budget_beside_decodes_and_drafts",
    ),
    "a step stays within its budget: a whole prompt fits": (
        Change(CONTINUOUS, "return missing if missing <= budget else 0", "return missing"),
        f"{BATCHING}::test_a_prompt_joins_exactly_to_the_budget_beside_decodes_and_drafts",
    ),
    "a step stays within its budget: decodes count": (
        Change(
            CONTINUOUS,
            "budget = self.max_num_batched_tokens - sum(step.num_scheduled_tokens.values())",
            "budget = self.max_num_batched_tokens",
        ),
        f"{BATCHING}::test_a_prompt_joins_exactly_to_the_budget_beside_decodes_and_drafts",
    ),
    "a step stays within its budget: drafts are cut": (
        Change(QUEUES, "room = min(budget, longest - num_tokens)", "room = longest - num_tokens"),
        f"{BATCHING}::test_drafts_are_cut_to_the_budget_before_any_required_token",
    ),
    "a step stays within its budget: drafts add up": (
        Change(QUEUES, "            budget -= granted\n", ""),
        f"{BATCHING}::test_drafts_are_cut_to_the_budget_before_any_required_token",
    ),
    "a step stays within its budget: a part of a prompt": (
        Change(CHUNKED, "return min(missing, budget)", "return missing"),
        f"{CHUNKS}::test_prompts_by_hand",
    ),
    "a step stays within its budget: a prompt that goes on": (
        Change(CHUNKED, "if budget < 0:", "if budget < -9999:"),
        f"{CHUNKS}::test_prompts_by_hand",
    ),
    "chunked: drafts get what prompts leave": (
        Change(
            CHUNKED,
            "        if not step.preempted:\n            budget = self._admit(step, budget)\n"
            "        self._grant_drafts(drafting, step, budget)\n",
            "        budget = self._grant_drafts(drafting, step, budget)\n"
            "        if not step.preempted:\n            self._admit(step, budget)\n",
        ),
        f"{CHUNKS}::test_drafts_get_only_what_neither_decodes_nor_prompts_want",
    ),
    "no draft goes past max_model_len": (
        Change(QUEUES, "room = min(budget, longest - num_tokens)", "room = budget"),
        f"{BATCHING}::test_drafts_are_cut_to_max_model_len",
    ),
    "a draft without a block is dropped": (
        Change(QUEUES, "if num_tokens + granted > sequence.num_reserved_tokens:", "if granted < 0:"),
        f"{BATCHING}::test_drafts_are_dropped_before_anybody_is_preempted",
    ),
    "first come, first served": (
        Change(
            CONTINUOUS, "return next(iter(self._waiting.values()))", "return next(reversed(self._waiting.values()))"
        ),
        f"{ORDERING}::test_first_come_first_served_by_default",
    ),
    "the shortest first": (
        Change(ORDER, "sequence.num_prompt_tokens + ageing_tokens_per_s * now_s", "ageing_tokens_per_s * now_s"),
        f"{ORDERING}::test_shortest_first_and_equals_by_arrival",
    ),
    "equals by arrival": (
        Change(
            ORDER,
            "(self._rank(sequence, now_s), next(self._arrivals))",
            "(self._rank(sequence, now_s), -next(self._arrivals))",
        ),
        f"{ORDERING}::test_shortest_first_and_equals_by_arrival",
    ),
    "the longest prompt does not starve": (
        Change(ORDER, "sequence.num_prompt_tokens + ageing_tokens_per_s * now_s", "sequence.num_prompt_tokens"),
        f"{ORDERING}::test_ageing_ends_the_wait_of_a_long_prompt_under_a_stream_of_short_ones",
    ),
    "the least urgent does not starve": (
        Change(ORDER, "* sequence.request.priority + ageing_tokens_per_s * now_s", "* sequence.request.priority"),
        f"{ORDERING}::test_ageing_ends_the_wait_of_the_least_urgent",
    ),
    "the most urgent first": (
        Change(ORDER, "CLASS_TOKENS * sequence.request.priority +", "0 * sequence.request.priority +"),
        f"{ORDERING}::test_priority_lowest_first_and_equals_by_arrival",
    ),
    "an unknown start does not starve": (
        Change(ORDER, "return self._ageing * self._added_s[sequence.seq_id] - found", "return -found"),
        f"{ORDERING}::test_ageing_ends_the_wait_of_a_start_that_nobody_knows",
    ),
    "the longest prefix first": (
        Change(
            ORDER,
            "return self._ageing * self._added_s[sequence.seq_id] - found",
            "return self._ageing * self._added_s[sequence.seq_id]",
        ),
        f"{ORDERING}::test_who_finds_most_in_the_cache_joins_first_and_equals_by_arrival",
    ),
    "who was aborted is forgotten": (
        Change(ORDER, "if seq_id in waiting and self._keys[seq_id] == key:", "if seq_id in waiting:"),
        f"{ORDERING}::test_one_that_was_aborted_leaves_no_trace_in_the_order",
    ),
    "by rank, the last in the order yields": (
        Change(
            ORDER, "return max(running, key=self._keys.__getitem__)", "return min(running, key=self._keys.__getitem__)"
        ),
        f"{ORDERING}::test_who_joined_last_in_the_order_yields_first_and_keeps_its_turn",
    ),
    "by rank, who yielded keeps its turn": (
        Change(CONTINUOUS, "            self._ranked.wait(sequence.seq_id)", "            pass"),
        f"{ORDERING}::test_all_that_had_to_yield_come_back_in_their_order",
    ),
    "the youngest yields": (
        Change(QUEUES, "return next(reversed(self._running.values()))", "return next(iter(self._running.values()))"),
        f"{BATCHING}::test_the_youngest_is_preempted_recomputed_and_keeps_what_it_emitted",
    ),
    "who yielded is the first to come back": (
        Change(QUEUES, "        self._waiting.move_to_end(sequence.seq_id, last=False)\n", ""),
        f"{BATCHING}::test_preempted_sequences_return_to_the_front_in_order_of_arrival",
    ),
    "what is lost is computed again": (
        Change(QUEUES, "        sequence.num_computed_tokens = 0\n", ""),
        f"{BATCHING}::test_the_youngest_is_preempted_recomputed_and_keeps_what_it_emitted",
    ),
    "drafts are lost with the row": (
        Change(
            QUEUES,
            "        sequence.draft_token_ids = []\n        sequence.preemptions",
            "        sequence.preemptions",
        ),
        f"{BATCHING}::test_the_youngest_is_preempted_recomputed_and_keeps_what_it_emitted",
    ),
    "a step that preempts admits nobody": (
        Change(
            CONTINUOUS,
            "        if not step.preempted:\n            self._admit",
            "        if True:\n            self._admit",
        ),
        f"{BATCHING}::test_nobody_joins_in_a_step_that_preempts",
    ),
    "a step that preempts admits nobody: in parts": (
        Change(CHUNKED, "        if not step.preempted:\n", "        if True:\n"),
        f"{CHUNKS}::test_nobody_joins_in_a_step_that_preempts",
    ),
    "a row is given back with its blocks": (
        Change(QUEUES, "        self._kv.free(seq_id)\n", ""),
        f"{BATCHING}::test_join_and_leave_at_every_step",
    ),
    "no more run than there are rows": (
        Change(
            CONTINUOUS, "while self._waiting and self._free_rows and budget > 0:", "while self._waiting and budget > 0:"
        ),
        f"{BATCHING}::test_join_and_leave_at_every_step",
    ),
    "who cannot join gives back what it began with": (
        Change(
            CONTINUOUS,
            "                self._kv.free(seq_id)\n                sequence.num_reserved_tokens = 0",
            "                sequence.num_reserved_tokens = 0",
        ),
        f"{ORDERING}::test_the_watermark_stays_free_at_admission_but_not_from_who_runs_nor_from_the_first",
    ),
    "what is found is not computed again": (
        Change(
            CONTINUOUS,
            "sequence.num_computed_tokens = sequence.num_reserved_tokens = cached",
            "sequence.num_reserved_tokens = cached",
        ),
        "batching/test_prefix_admission.py"
        "::test_what_is_found_costs_no_budget_and_leaves_the_blocks_alone_that_it_cannot_have",
    ),
    "static: padding counts against the budget": (
        Change(STATIC, "if padded * (count + 1) > self.max_num_batched_tokens or blocks", "if blocks"),
        "batching/test_static.py::test_padded_prompts_stay_within_the_step_budget",
    ),
    "static: dead rows count against the budget": (
        Change(
            STATIC,
            "self.max_num_batched_tokens - len(self._dead) - live_rows",
            "self.max_num_batched_tokens - live_rows",
        ),
        "batching/test_static.py::test_drafts_grow_only_live_rows_and_leave_room_for_the_dead",
    ),
    "static: a batch ends with its last": (
        Change(STATIC, "        if self._running:\n            return False\n", ""),
        "batching/test_static.py::test_finish_says_whether_the_cache_is_free",
    ),
    "the watermark stays free": (
        Change(
            CONTINUOUS,
            "return wanted + self._blocks_left_free <= self._kv.num_free_blocks",
            "return wanted <= self._kv.num_free_blocks",
        ),
        f"{ORDERING}::test_the_watermark_stays_free_at_admission_but_not_from_who_runs_nor_from_the_first",
    ),
    "the watermark is not kept from the first": (
        Change(CONTINUOUS, "if not self._blocks_left_free or not self._running:", "if not self._blocks_left_free:"),
        f"{ORDERING}::test_the_watermark_stays_free_at_admission_but_not_from_who_runs_nor_from_the_first",
    ),
    "a sample has logits of its own": (
        Change(
            CONTINUOUS,
            "known = min(sequence.num_prompt_tokens, sequence.num_tokens - 1)",
            "known = sequence.num_prompt_tokens",
        ),
        SAMPLES,
    ),
    "swap: only what is written leaves": (
        Change(
            CONTINUOUS,
            "return tuple(self._kv.block_table(sequence.seq_id)[:count])",
            "return tuple(self._kv.block_table(sequence.seq_id))",
        ),
        f"{SWAPS}::test_only_blocks_that_hold_something_are_copied",
    ),
    "swap: what waits in host memory adds up": (
        Change(CONTINUOUS, "sum(self._in_host.values()) + tokens > limit", "tokens > limit"),
        f"{SWAPS}::test_room_in_host_memory_is_found_again_when_somebody_has_left_it",
    ),
    "swap: who is gone from host memory makes room": (
        Change(
            CONTINUOUS,
            "    def _forget(self, seq_id: str) -> None:\n        self._in_host.pop(seq_id, None)\n",
            "    def _forget(self, seq_id: str) -> None:\n",
        ),
        f"{SWAPS}::test_room_in_host_memory_is_found_again_when_somebody_has_left_it",
    ),
}
