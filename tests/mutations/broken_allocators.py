"""The rules of blocks and reservations, broken."""

from __future__ import annotations

from change import Change

BLOCKS = "impls/kv_cache/blocks.py"
BUDDY = "impls/kv_cache/buddy.py"
RESERVED = "impls/kv_cache/reserved.py"
CONTINUOUS = "impls/batching/continuous.py"
HELD = "impls/topology/held_blocks.py"
PAGED = "kv_cache/test_block_managers.py::TestPaged"
FOUND = "kv_cache/test_prefix_reuse.py::TestWhatIsFound"
SAMPLES = "batching/test_samples.py::test_four_samples_by_hand"
HANDED_OVER = (
    "topology/test_topology_options.py::test_held_blocks_stay_with_a_sequence_that_was_freed_until_they_are_let_go"
)

ALLOCATORS: dict[str, tuple[Change, str]] = {
    "a block is handed out once": (Change(BLOCKS, "del free[-missing:]", "del free[-1:]"), PAGED),
    "holders are counted: all of them": (
        Change(BLOCKS, "self._extra_holders.get(block, 0) + 1", "1"),
        SAMPLES,
    ),
    "holders are counted: down to the last": (Change(BLOCKS, "if extra == 1:", "if extra >= 1:"), SAMPLES),
    "what is shared is not freed by the first who goes": (
        Change(BLOCKS, "if self._index is None and not self._extra_holders:", "if self._index is None:"),
        SAMPLES,
    ),
    "a fork holds what it shares": (
        Change(BLOCKS, "        self._hold(table)\n        if source", "        if source"),
        SAMPLES,
    ),
    "copy on write: only full blocks are shared": (
        Change(BLOCKS, "[: num_tokens // self.block_size]", "[: -(-num_tokens // self.block_size)]"),
        SAMPLES,
    ),
    "copy on write: the last block is copied": (
        Change(CONTINUOUS, "        if rest:", "        if rest < 0:"),
        SAMPLES,
    ),
    "a fork waits for what it shares to be computed": (
        Change(BLOCKS, "if num_tokens > self._computed[source]:", "if num_tokens < 0:"),
        "batching/test_samples.py::test_a_prompt_in_chunks_is_waited_for",
    ),
    "freed twice is an error": (
        Change(
            BLOCKS,
            "table = self._tables.pop(seq_id)\n        del self._computed[seq_id]",
            "table = self._tables.pop(seq_id, [])\n        self._computed.pop(seq_id, None)",
        ),
        PAGED,
    ),
    "freed blocks are free": (Change(BLOCKS, "self._free.extend(reversed(table))", "pass"), PAGED),
    "neighbours are handed out as neighbours": (
        Change(BLOCKS, "self._free.extend(reversed(table))", "self._free.extend(table)"),
        "kv_cache/test_block_managers.py::test_neighbouring_blocks_stay_neighbours_when_they_are_reused",
    ),
    "what is verified stays verified": (
        Change(BLOCKS, "if not committed <= num_computed_tokens <=", "if not 0 <= num_computed_tokens <="),
        PAGED,
    ),
    "nothing is committed past the reservation": (
        Change(
            BLOCKS, "<= num_computed_tokens <= len(self._tables[seq_id]) * self.block_size", "<= num_computed_tokens"
        ),
        PAGED,
    ),
    "an allocation that fails changes nothing": (
        Change(BLOCKS, "if count > len(self._cached):", "if not self._cached:"),
        f"{FOUND}::test_an_allocation_that_fails_evicts_nothing",
    ),
    "no sequence outgrows max_model_len": (
        Change(BLOCKS, "if not 0 < num_tokens <= self.max_model_len:", "if not 0 < num_tokens:"),
        PAGED,
    ),
    "what is handed over outlives its sequence": (
        Change(HELD, "if seq_id not in self._held:", "if True:"),
        HANDED_OVER,
    ),
    "what was taken is let go once": (
        Change(HELD, "if self._held.pop(seq_id, None) is not None:", "if self._held.get(seq_id) is not None:"),
        HANDED_OVER,
    ),
    "halves that are free again are joined": (
        Change(BUDDY, "address = min(address, buddy)\n            order += 1", "break"),
        "kv_cache/test_reserved.py::TestBuddy",
    ),
    "a piece is cut to what is wanted": (
        Change(BUDDY, "while order > wanted:", "while order > wanted + 1:"),
        "kv_cache/test_reserved.py::TestBuddy",
    ),
    "pow2 rounds the output's length up": (
        Change(
            RESERVED,
            "order_of(max_total_tokens - num_prompt_tokens)",
            "order_of(max_total_tokens - num_prompt_tokens) - 1",
        ),
        "kv_cache/test_reserved.py::test_the_papers_example_of_25_output_tokens_reserves_32",
    ),
    "a piece is given back with its sequence": (
        Change(RESERVED, "self._pieces.free(table[0])", "pass"),
        "kv_cache/test_reserved.py::TestReserved",
    ),
}
