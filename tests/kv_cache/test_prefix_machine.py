"""Blocks that sequences share: both indexes against a naive model of what is known, what is written and what goes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prefix_caches import BLOCKS, LONGEST, SIZE, cache

from impls.kv_cache.hash_chain import HashChain
from impls.kv_cache.radix import RadixTree
from impls.seams import PrefixIndex

# They hash alike (Python's integers hash modulo 2**61 - 1), and so do the tuples that they stand in.
TOKENS = st.sampled_from([1, 1, 2**61])
Content = tuple[int, ...]


class SharingMachine(RuleBasedStateMachine):
    """The model knows which contents (all tokens up to the end of a block) somebody has computed, who holds a copy,
    and in which order those that nobody holds will go. ``kv_of`` is what the tensors would hold: of each position, all
    tokens up to it, as keys and values depend on them all.
    """

    index: type[PrefixIndex]

    def __init__(self) -> None:
        super().__init__()
        self.kv = cache(self.index)
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.brought: dict[str, int] = {}  # of a sequence that came with keys and values: positions
        self.publishes: dict[str, bool] = {}
        self.holders: dict[Content, list[str]] = {}
        self.left_behind: list[Content] = []
        self.kv_of: dict[tuple[int, int], Content | None] = {}
        self.ever: list[list[int]] = [[]]
        self.count = 0

    # --- the model ----------------------------------------------------------------------------------------------------

    def contents(self, tokens: Seq[int], computed: int) -> list[Content]:
        return [tuple(tokens[: (i + 1) * SIZE]) for i in range(computed // SIZE)]

    def held(self) -> set[int]:
        return {block for seq_id in self.tokens for block in self.kv.block_table(seq_id)}

    def write(self, seq_id: str, position: int, content: Content | None) -> None:
        table = self.kv.block_table(seq_id)
        block = table[position // SIZE]
        others = [b for other in self.tokens if other != seq_id for b in self.kv.block_table(other)]
        assert block not in others, "a block that another holds is written"
        assert block not in self.kv._index.contents(), "a published block is written"  # type: ignore[union-attr]
        self.kv_of[block, position % SIZE] = content

    def allocate(self, seq_id: str, num_tokens: int) -> bool:
        held = self.held()
        missing = max(0, -(-num_tokens // SIZE) - len(self.kv.block_table(seq_id)))
        free = BLOCKS - len(held) - len(self.left_behind)
        fits = missing <= free + len(self.left_behind)
        before = list(self.kv.block_table(seq_id))
        assert self.kv.allocate(seq_id, num_tokens) is fits
        table = list(self.kv.block_table(seq_id))
        assert table[: len(before)] == before, "a table is append-only"
        if fits:
            for content in self.left_behind[: max(0, missing - free)]:
                del self.holders[content]
            del self.left_behind[: max(0, missing - free)]
            new = table[len(before) :]
            assert len(new) == missing and held.isdisjoint(new)
            for block in new:
                self.kv_of |= {(block, offset): None for offset in range(SIZE)}  # poison
        return fits

    def drop(self, seq_id: str) -> None:
        self.kv.free(seq_id)
        if self.publishes.pop(seq_id):
            for content in reversed(self.contents(self.tokens[seq_id], self.computed[seq_id])):
                self.holders[content].remove(seq_id)
                if not self.holders[content]:
                    self.left_behind.append(content)
        self.brought.pop(seq_id, None)
        del self.tokens[seq_id], self.computed[seq_id]

    # --- what may happen ----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.tokens) < 5)
    @rule(data=st.data(), extra=st.lists(TOKENS, min_size=1, max_size=3))
    def begin(self, data: st.DataObject, extra: list[int]) -> None:
        start = data.draw(st.sampled_from(self.ever))
        tokens = (start[: data.draw(st.integers(0, len(start)))] + extra)[:LONGEST]
        seq_id = str(self.count)
        self.count += 1
        expected = 0
        for content in self.contents(tokens, len(tokens) - 1):
            if content not in self.holders:
                break
            expected += SIZE
        found = self.kv.begin(seq_id, tokens)
        assert found == expected, "what is known is found, up to the last token"
        with pytest.raises(ValueError, match="has begun"):
            self.kv.begin(seq_id, tokens)
        for position in range(found):
            block = self.kv.block_table(seq_id)[position // SIZE]
            assert self.kv_of[block, position % SIZE] == tuple(tokens[: position + 1]), "a hit on other tokens"
        self.tokens[seq_id], self.computed[seq_id], self.publishes[seq_id] = tokens, found, True
        for content in self.contents(tokens, found):
            if content in self.left_behind:
                self.left_behind.remove(content)
            self.holders[content].append(seq_id)
        if not self.allocate(seq_id, len(tokens)):
            self.drop(seq_id)

    @precondition(lambda self: len(self.tokens) < 5)
    @rule(data=st.data(), extra=st.lists(TOKENS, min_size=2, max_size=3))
    def come_back(self, data: st.DataObject, extra: list[int]) -> None:
        """From host memory, or from another worker. It finds nothing, and shares what it brings once it commits."""
        start = data.draw(st.sampled_from(self.ever))
        tokens = (start + extra)[:LONGEST]
        seq_id = str(self.count)
        self.count += 1
        assert self.kv.begin(seq_id, tokens, reuse=False) == 0
        self.tokens[seq_id], self.computed[seq_id], self.publishes[seq_id] = tokens, 0, True
        if not self.allocate(seq_id, len(tokens)):
            self.drop(seq_id)
            return
        self.brought[seq_id] = data.draw(st.integers(1, len(tokens) - 1))
        for position in range(self.brought[seq_id]):
            self.write(seq_id, position, tuple(tokens[: position + 1]))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), drafts=st.integers(0, 3))
    def step(self, data: st.DataObject, drafts: int) -> None:
        """Some of what it misses is computed; at the end of its tokens, drafts as well, of which some are accepted."""
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens, committed = self.tokens[seq_id], self.computed[seq_id]
        computed = self.brought.get(seq_id, committed)
        end = data.draw(st.integers(min(computed + 1, len(tokens)), len(tokens)))
        drafted = [data.draw(TOKENS) for _ in range(min(drafts, LONGEST - len(tokens)))] if end == len(tokens) else []
        if not self.allocate(seq_id, end + len(drafted)):
            return
        with_drafts = tokens + drafted
        for position in range(computed, end + len(drafted)):
            self.write(seq_id, position, tuple(with_drafts[: position + 1]))
        accepted = data.draw(st.integers(0, len(drafted)))
        if end == len(tokens) < LONGEST:
            tokens += drafted[:accepted]
            end += accepted
            tokens += [data.draw(TOKENS)] if len(tokens) < LONGEST else []  # sampled; its K/V is not written yet
        self.kv.commit(seq_id, end)
        self.brought.pop(seq_id, None)
        if self.publishes[seq_id]:
            for content in self.contents(tokens, end)[committed // SIZE :]:
                if content in self.left_behind:  # a last block, which is never looked up: now somebody holds a copy
                    self.left_behind.remove(content)
                self.holders.setdefault(content, []).append(seq_id)
        self.computed[seq_id] = end
        self.ever.append(list(tokens))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """It finishes, or is preempted: `begin` may come back with its tokens."""
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.drop(seq_id)
        with pytest.raises(KeyError):
            self.kv.free(seq_id)

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefixes()
        self.holders.clear()
        self.left_behind.clear()
        self.publishes = dict.fromkeys(self.publishes, False)

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.kv.check_invariants()
        held = self.held()
        assert self.kv.num_free_blocks == BLOCKS - len(held)
        tables = [self.kv.block_table(seq_id) for seq_id in self.tokens]
        assert self.kv.shared_tokens == SIZE * (sum(map(len, tables)) - len(held))
        assert set(self.kv._index.contents().values()) == self.holders.keys()  # type: ignore[union-attr]
        for seq_id, tokens in self.tokens.items():
            table = self.kv.block_table(seq_id)
            for position in range(self.computed[seq_id]):
                wanted = tuple(tokens[: position + 1])
                assert self.kv_of[table[position // SIZE], position % SIZE] == wanted, "overwritten while in use"


class HashChainMachine(SharingMachine):
    index = HashChain


class RadixMachine(SharingMachine):
    index = RadixTree


TestHashChain = HashChainMachine.TestCase
TestRadix = RadixMachine.TestCase
TestHashChain.settings = TestRadix.settings = settings(
    max_examples=60, stateful_step_count=40
)
