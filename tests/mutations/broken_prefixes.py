"""The rules of hash chain and radix tree, broken."""

from __future__ import annotations

from change import Change

BLOCKS = "impls/kv_cache/blocks.py"
CHAIN = "impls/kv_cache/hash_chain.py"
RADIX = "impls/kv_cache/radix.py"
FOUND = "kv_cache/test_prefix_reuse.py::TestWhatIsFound"
SHARING = "kv_cache/test_prefix_machine.py"
TREE = "kv_cache/test_prefix_reuse.py::TestRadixTree"

PREFIXES: dict[str, tuple[Change, str]] = {
    "a hit leaves the last token to be computed": (
        Change(
            BLOCKS,
            "table.extend(self._index.match(token_ids, (len(token_ids) - 1) // self.block_size))",
            "table.extend(self._index.match(token_ids, len(token_ids) // self.block_size))",
        ),
        f"{FOUND}::test_a_prompt_that_is_known_whole_still_computes_its_last_token",
    ),
    "who finds a block holds it": (
        Change(BLOCKS, "                self._hold(table)\n            self._tokens", "            self._tokens"),
        f"{FOUND}::test_what_is_held_is_never_evicted",
    ),
    "only what is full and committed is published": (
        Change(
            BLOCKS,
            "committed // self.block_size, num_computed_tokens // self.block_size",
            "committed // self.block_size, len(self._tables[seq_id])",
        ),
        f"{FOUND}::test_nothing_is_found_before_it_is_committed",
    ),
    "what cannot be reused is not looked up": (
        Change(BLOCKS, "            if reuse:", "            if True:"),
        f"{SHARING}::TestRadix",
    ),
    "a block is published behind the one before it": (
        Change(BLOCKS, "table[i - 1] if i else None", "None"),
        f"{FOUND}::test_equal_tokens_behind_another_start_are_not_found",
    ),
    "what is published stays when its last holder goes": (
        Change(BLOCKS, "                self._cached[block] = None", "                self._free.append(block)"),
        f"{FOUND}::test_what_is_held_is_never_evicted",
    ),
    "a copy that nobody holds goes when another is held": (
        Change(BLOCKS, "if copy is not None and copy in self._cached:", "if copy is not None and copy < 0:"),
        f"{FOUND}::test_a_copy_that_nobody_holds_goes_when_another_is_held",
    ),
    "the least recently released goes first": (
        Change(BLOCKS, "self._cached.popitem(last=False)", "self._cached.popitem(last=True)"),
        f"{FOUND}::test_the_least_recently_released_goes_first_and_its_end_before_its_start",
    ),
    "the end of a sequence goes before its start": (
        Change(BLOCKS, "for block in reversed(table):", "for block in table:"),
        f"{FOUND}::test_the_least_recently_released_goes_first_and_its_end_before_its_start",
    ),
    "what is evicted is found no more": (
        Change(BLOCKS, "            self._index.evict(block)\n", ""),
        f"{FOUND}::test_a_cache_that_has_turned_over_many_times_keeps_its_contents_apart",
    ),
    "cached blocks can be had": (
        Change(BLOCKS, "return len(self._free) + len(self._cached)", "return len(self._free)"),
        f"{FOUND}::test_an_allocation_that_fails_evicts_nothing",
    ),
    "after a reset nobody publishes what came before it": (
        Change(BLOCKS, "            self._tokens.clear()\n", ""),
        f"{FOUND}::test_reset_forgets_all_and_takes_nothing_away",
    ),
    "hash chain: the key holds what stands before": (
        Change(
            CHAIN,
            "key = (START if after is None else self._entry_of[after].number, tuple(token_ids))",
            "key = (START, tuple(token_ids))",
        ),
        f"{FOUND}::test_equal_tokens_behind_another_start_are_not_found[HashChain]",
    ),
    "hash chain: so does the key that is looked up": (
        Change(CHAIN, "number = entry.number", "number = START"),
        f"{FOUND}::test_two_copies_of_one_content_stay_where_they_are[HashChain]",
    ),
    "hash chain: tokens are compared, not their hashes": (
        Change(
            CHAIN,
            "entry = entries.get((number, tuple(token_ids[start : start + size])))",
            "own = hash(tuple(token_ids[start : start + size]))\n"
            "            entry = {(n, hash(t)): e for (n, t), e in entries.items()}.get((number, own))",
        ),
        f"{FOUND}::test_tokens_that_hash_alike_are_told_apart[HashChain]",
    ),
    "hash chain: what comes back has a new number": (
        Change(CHAIN, "self._last_number += 1", "self._last_number = len(self._entries) + 1"),
        f"{FOUND}::test_a_cache_that_has_turned_over_many_times_keeps_its_contents_apart[HashChain]",
    ),
    "hash chain: of two copies the second is given up": (
        Change(CHAIN, "if len(entry.blocks) == 1:", "if entry.blocks:"),
        f"{FOUND}::test_two_copies_of_one_content_stay_where_they_are[HashChain]",
    ),
    "radix: an edge is split where two part": (
        Change(RADIX, "            self._split(node, at)", "            pass"),
        f"{TREE}::test_an_edge_is_split_where_two_sequences_part_and_nowhere_else",
    ),
    "radix: the lower half keeps the children": (
        Change(RADIX, "            child.parent = lower", "            pass"),
        f"{TREE}::test_an_edge_is_split_where_two_sequences_part_and_nowhere_else",
    ),
    "radix: the blocks of the lower half lie there": (
        Change(
            RADIX, "            self._places.update((block, (lower, number)) for block in copies)", "            pass"
        ),
        f"{TREE}::test_an_edge_is_split_where_two_sequences_part_and_nowhere_else",
    ),
    "radix: tokens of an edge are compared": (
        Change(RADIX, "if child.tokens[: length * size] != wanted:", "if not child.tokens:"),
        f"{TREE}::test_an_edge_is_split_where_two_sequences_part_and_nowhere_else",
    ),
    "radix: who leaves an edge midway does not reach its children": (
        Change(RADIX, "if length < len(child.blocks):", "if length < 0:"),
        f"{TREE}::test_an_edge_that_is_left_midway_leads_to_no_child",
    ),
    "radix: what others follow is not evicted: in the edge": (
        Change(RADIX, "if node.children or number != node.depth + len(node.blocks) - 1:", "if node.children:"),
        f"{TREE}::test_only_the_end_of_a_leaf_can_be_evicted",
    ),
    "radix: what others follow is not evicted: at its end": (
        Change(RADIX, "if node.children or number != node.depth", "if number != node.depth"),
        f"{TREE}::test_only_the_end_of_a_leaf_can_be_evicted",
    ),
    "radix: an edge without blocks is gone": (
        Change(RADIX, "            del node.parent.children[key]", "            pass"),
        f"{TREE}::test_only_the_end_of_a_leaf_can_be_evicted",
    ),
    "radix: of two copies the second is given up": (
        Change(RADIX, "if len(copies) == 1:", "if copies:"),
        f"{FOUND}::test_two_copies_of_one_content_stay_where_they_are[RadixTree]",
    ),
}
