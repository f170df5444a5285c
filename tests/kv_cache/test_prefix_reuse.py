"""Blocks that sequences share: both indexes against a naive model of what is known, what is written and what goes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from impls.kv_cache.hash_chain import HashChain
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.radix import RadixTree
from impls.seams import Arm, ModelShape, PrefixIndex

INDEXES = [HashChain, RadixTree]
SIZE = 2  # positions in a block
BLOCKS = 9
LONGEST = 12
# They hash alike (Python's integers hash modulo 2**61 - 1), and so do the tuples that they stand in.
TOKENS = st.sampled_from([1, 1, 2**61])
Content = tuple[int, ...]


def cache(index: type[Any], blocks: int = BLOCKS, size: int = SIZE, longest: int = LONGEST) -> PagedCache:
    kv = PagedCache(budget_bytes=blocks * size, bytes_per_token=1, max_model_len=longest, block_size=size)
    kv.share_prefixes(index(block_size=size))
    return kv


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
        assert self.kv.can_allocate(seq_id, num_tokens) is fits
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

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), drafts=st.integers(0, 3))
    def step(self, data: st.DataObject, drafts: int) -> None:
        """Some of what it misses is computed; at the end of its tokens, drafts as well, of which some are accepted."""
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens, computed = self.tokens[seq_id], self.computed[seq_id]
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
        if self.publishes[seq_id]:
            for content in self.contents(tokens, end)[computed // SIZE :]:
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
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def compute(kv: PagedCache, seq_id: str, tokens: list[int]) -> int:
    """A sequence from its admission to the commit of its last token; how many positions it found."""
    found = kv.begin(seq_id, tokens)
    assert kv.allocate(seq_id, len(tokens))
    kv.commit(seq_id, len(tokens))
    return found


@pytest.mark.parametrize("index", INDEXES)
class TestWhatIsFound:
    @pytest.mark.parametrize("length", range(1, 14))
    def test_a_prompt_that_is_known_whole_still_computes_its_last_token(self, index: type[Any], length: int) -> None:
        """nano-vllm#144, vllm#11186: all cached, and a multiple of the block size, gave a query of length 0."""
        kv = cache(index, blocks=16, size=4, longest=16)
        tokens = list(range(length))
        assert compute(kv, "a", tokens) == 0
        kv.free("a")
        assert kv.begin("b", list(tokens)) == (length - 1) // 4 * 4 < length

    def test_nothing_is_found_before_it_is_committed(self, index: type[Any]) -> None:
        """vllm#41838: published when it was scheduled, a block was read in the very step that was to write it."""
        kv = cache(index)
        tokens = [1, 1, 1, 1, 1]
        assert kv.begin("a", tokens) == 0 and kv.allocate("a", 5)
        assert kv.begin("b", tokens) == 0 and kv.allocate("b", 5)
        assert set(kv.block_table("a")).isdisjoint(kv.block_table("b"))
        kv.commit("a", 3)
        assert kv.begin("c", tokens) == 2, "only the block that is full"

    def test_two_copies_of_one_content_stay_where_they_are(self, index: type[Any]) -> None:
        """mini-sglang#142: the second copy was freed while its sequence's table still pointed at it."""
        kv = cache(index)
        tokens = [1, 1, 1, 1, 1]
        for seq_id in ("a", "b"):
            assert kv.begin(seq_id, tokens) == 0 and kv.allocate(seq_id, 5)
        own = list(kv.block_table("b"))
        kv.commit("a", 5)
        kv.commit("b", 5)
        assert kv.block_table("b") == own and kv.num_free_blocks == BLOCKS - 6
        kv.free("a")
        assert kv.num_free_blocks == BLOCKS - 3 and not kv._cached, "b's copy is enough"
        assert kv.begin("c", list(tokens)) == 4 and list(kv.block_table("c")) == own[:2]
        kv.check_invariants()

    def test_a_copy_that_nobody_holds_goes_when_another_is_held(self, index: type[Any]) -> None:
        """The last block of a prompt is not looked up, so that it is computed again beside what is kept of it."""
        kv = cache(index)
        for seq_id in ("a", "b", "c"):
            assert compute(kv, seq_id, [1, 1, 1, 1]) == (0 if seq_id == "a" else 2)
            kv.check_invariants()
            assert kv.num_free_blocks == BLOCKS - 2 and not kv._cached
            kv.free(seq_id)
            assert len(kv._cached) == 2

    def test_drafts_that_were_rejected_are_not_found(self, index: type[Any]) -> None:
        kv = cache(index)
        tokens = [1, 1, 1]
        kv.begin("a", tokens)
        assert kv.allocate("a", 7)  # four drafts behind the three tokens
        tokens += [2, 1]  # one was accepted, and a token recovered, whose keys and values are not written
        kv.commit("a", 4)
        assert kv.begin("b", [1, 1, 1, 2, 1, 1, 1]) == 4
        assert kv.begin("c", [1, 1, 1, 1, 1, 1, 1]) == 2

    def test_what_was_preempted_finds_its_own_blocks(self, index: type[Any]) -> None:
        """nano-vllm#211: it came back longer than its prompt, and was counted by what it had been."""
        kv = cache(index)
        tokens = [1, 1, 2, 2, 1]
        compute(kv, "a", tokens)
        tokens += [2, 2]
        kv.free("a")
        assert kv.begin("a", tokens) == 4
        assert kv.allocate("a", 7)
        kv.commit("a", 7)
        kv.free("a")
        assert kv.begin("a", tokens) == 6

    def test_equal_tokens_behind_another_start_are_not_found(self, index: type[Any]) -> None:
        kv = cache(index)
        compute(kv, "a", [1, 1, 2, 2])
        assert kv.begin("b", [2, 2, 1, 1, 1]) == 0
        assert kv.begin("c", [1, 2, 2, 2, 1]) == 0

    def test_tokens_that_hash_alike_are_told_apart(self, index: type[Any]) -> None:
        """vllm#12621: with the bare hash as the key, one prompt would be served the other's keys and values."""
        kv = cache(index)
        one, other = [1, 1, 1], [2**61, 1, 1]
        assert hash(tuple(one)) == hash(tuple(other)) and one != other
        compute(kv, "a", one)
        assert kv.begin("b", other) == 0

    def test_the_least_recently_released_goes_first_and_its_end_before_its_start(self, index: type[Any]) -> None:
        kv = cache(index)
        for seq_id, token in (("a", 1), ("b", 2)):
            compute(kv, seq_id, [token] * 6)
        kv.free("a")
        kv.free("b")
        assert kv.begin("again", [1] * 7) == 6
        kv.free("again")
        assert kv.allocate("new", 10)  # five blocks: three are free, two of b's go
        for tokens, found in (([2] * 7, 2), ([1] * 7, 6)):
            assert kv.begin("probe", tokens) == found
            kv.free("probe")
        kv.check_invariants()

    def test_a_cache_that_has_turned_over_many_times_keeps_its_contents_apart(self, index: type[Any]) -> None:
        kv = cache(index, blocks=7)
        rng = np.random.default_rng(5)
        for turn in range(60):
            tokens = rng.integers(0, 3, 2 + turn % 7).tolist()
            found = kv.begin("a", tokens)
            assert found == 0 or tuple(tokens[:found]) in kv._index.contents().values()  # type: ignore[union-attr]
            assert kv.allocate("a", len(tokens))
            kv.commit("a", len(tokens))
            kv.free("a")
            kv.check_invariants()

    def test_what_is_held_is_never_evicted(self, index: type[Any]) -> None:
        kv = cache(index, blocks=4)
        compute(kv, "a", [1] * 4)
        kv.free("a")
        assert kv.begin("b", [1] * 5) == 4 and kv.allocate("b", 5)
        assert not kv.allocate("c", 3) and kv.allocate("c", 2)
        assert kv.begin("d", [1] * 5) == 4
        assert not kv.allocate("d", 5)
        kv.free("d")
        kv.check_invariants()

    def test_a_sequence_that_only_allocates_shares_nothing(self, index: type[Any]) -> None:
        kv = cache(index)
        assert kv.allocate("a", 4)
        kv.commit("a", 4)
        kv.free("a")
        assert not kv._cached and kv.num_free_blocks == BLOCKS

    def test_reset_forgets_all_and_takes_nothing_away(self, index: type[Any]) -> None:
        kv = cache(index)
        running = [1, 1, 1]
        compute(kv, "a", running)
        compute(kv, "b", [2, 2, 2])
        assert kv.begin("c", [1, 1, 2]) == 2
        kv.free("b")
        held = list(kv.block_table("a"))
        kv.reset_prefixes()
        assert kv.block_table("a") == held and kv.num_free_blocks == BLOCKS - 2
        running += [1]
        kv.commit("a", 4)
        assert kv.begin("d", [1] * 5) == 0 and kv.begin("e", [2] * 5) == 0
        for seq_id in ("a", "c", "d", "e"):
            kv.free(seq_id)
        kv.check_invariants()
        assert kv.num_free_blocks == BLOCKS


def test_without_an_index_nothing_is_kept_and_nothing_found() -> None:
    kv = PagedCache(budget_bytes=16, bytes_per_token=1, max_model_len=8, block_size=2)
    assert compute(kv, "a", [1, 1, 1, 1]) == 0 == compute(kv, "b", [1, 1, 1, 1])
    kv.reset_prefixes()
    kv.free("a")
    assert kv.num_free_blocks == 6 and kv.shared_tokens == 0
    kv.check_invariants()


class TestRadixTree:
    def test_an_edge_is_split_where_two_sequences_part_and_nowhere_else(self) -> None:
        tree = RadixTree(block_size=2)
        after = None
        for block in range(4):  # 0 0 | 1 1 | 2 2 | 3 3
            tree.publish([block, block], block, after)
            after = block
        (edge,) = tree._root.children.values()
        assert edge.blocks == [[0], [1], [2], [3]] and not edge.children
        tree.publish([7, 7], 4, 1)
        assert edge.blocks == [[0], [1]] and edge.tokens == [0, 0, 1, 1]
        assert {key: child.blocks for key, child in edge.children.items()} == {(2, 2): [[2], [3]], (7, 7): [[4]]}
        assert tree.match([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], 5) == [0, 1, 2, 3]
        assert tree.match([0, 0, 1, 1, 7, 7], 3) == [0, 1, 4]
        assert tree.match([0, 0, 1, 9], 2) == [0] and tree.match([0, 0, 1, 1], 1) == [0]
        assert tree.contents()[4] == (0, 0, 1, 1, 7, 7)
        tree.publish([9, 9], 5, 0)  # parts above the children, which now hang from the lower half
        assert edge.blocks == [[0]] and tree.match([0, 0, 1, 1, 2, 2], 3) == [0, 1, 2]
        for block in (3, 2, 4, 1, 5, 0):
            assert block in tree.contents()
            tree.evict(block)
        assert tree.contents() == {} and not tree._root.children

    def test_only_the_end_of_a_leaf_can_be_evicted(self) -> None:
        tree = RadixTree(block_size=1)
        for block, after in ((0, None), (1, 0), (2, 1)):
            tree.publish([block], block, after)
        for block in (0, 1):
            with pytest.raises(ValueError, match="followed by others"):
                tree.evict(block)
        for block in (2, 1, 0):
            tree.evict(block)
        assert not tree._root.children and tree.contents() == {}


class TestInvariantCheck:
    """`check_invariants` sees each kind of damage: the state machines rest on it."""

    DAMAGE: ClassVar[dict[str, Any]] = {
        "not share": lambda kv: kv._extra_holders.clear(),
        "both held and cached": lambda kv: kv._cached.__setitem__(kv._tables["a"][0], None),
        "both free and cached": lambda kv: kv._free.append(next(iter(kv._cached))),
        "number of shared": lambda kv: setattr(kv, "_num_shared", 0),
        "before what follows": lambda kv: kv._cached.move_to_end(next(iter(kv._cached))),
        "is not published as": lambda kv: kv._tokens["a"].__setitem__(0, 9),
        "to which it will write": lambda kv: kv._computed.__setitem__("a", 3),
        "tokens without": lambda kv: kv._tokens.__setitem__("z", [1]),
        "cached block is not published": lambda kv: kv._index.evict(next(iter(kv._cached))),
    }

    @pytest.mark.parametrize("index", INDEXES)
    @pytest.mark.parametrize("damage", DAMAGE)
    def test_sees(self, damage: str, index: type[Any]) -> None:
        kv = cache(index)
        compute(kv, "a", [1, 1, 1, 1])
        compute(kv, "b", [1, 1, 2])
        compute(kv, "c", [2, 2, 2, 2])
        kv.free("c")
        kv.check_invariants()
        self.DAMAGE[damage](kv)
        with pytest.raises(AssertionError, match=damage):
            kv.check_invariants()


@pytest.mark.parametrize("index", INDEXES)
def test_validate_says_where_nothing_can_be_shared(index: type[Any]) -> None:
    shape = ModelShape(64, 8, 8, 3, 2, 1, 4, 512)

    def reasons(kv_cache: dict[str, Any], batching: str) -> list[str]:
        arm = Arm({"kv_cache": kv_cache, "batching": {"name": batching}}, shape, 40, "cpu", 1 << 20)
        found: list[str] = index.validate(arm)
        return found

    paged = {"name": "paged", "block_size": 16}
    assert reasons(paged, "continuous") == []
    (why,) = reasons({"name": "contiguous"}, "continuous")
    assert why.startswith("needs kv_cache=paged: kv_cache=contiguous holds a sequence in one piece")
    (why,) = reasons(paged, "static")
    assert why.startswith("batching=static computes every prompt")
