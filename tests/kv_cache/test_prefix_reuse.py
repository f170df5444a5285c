"""Blocks that sequences share, case by case: what is found, kept and given up (at random: `test_prefix_machine`)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from prefix_caches import BLOCKS, INDEXES, cache

from impls.kv_cache.paged import PagedCache
from impls.kv_cache.radix import RadixTree
from impls.seams import Arm, ModelShape


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
        assert list(kv.block_table("b")) == own and kv.num_free_blocks == BLOCKS - 6
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

    def test_an_allocation_that_fails_evicts_nothing(self, index: type[Any]) -> None:
        """Two blocks of four are cached and two are held: three are not to be had."""
        kv = cache(index, blocks=4)
        compute(kv, "a", [1] * 4)
        kv.free("a")
        assert kv.allocate("b", 4) and kv.num_free_blocks == 2
        assert not kv.allocate("c", 5)
        assert kv.begin("d", [1] * 5) == 4
        assert kv.num_free_blocks == 0

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
        assert list(kv.block_table("a")) == held and kv.num_free_blocks == BLOCKS - 2
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
        tree.publish([9], 3, 1)  # now 0 and 1 end an edge that has children
        with pytest.raises(ValueError, match="followed by others"):
            tree.evict(1)
        for block in (2, 3, 1, 0):
            tree.evict(block)
        assert not tree._root.children and tree.contents() == {}

    def test_an_edge_that_is_left_midway_leads_to_no_child(self) -> None:
        """1 2 with the child 3: what begins 1 3 is known up to 1."""
        tree = RadixTree(block_size=1)
        for block, token, after in ((0, 1, None), (1, 2, 0), (2, 3, 1), (3, 4, 1)):
            tree.publish([token], block, after)
        assert tree.match([1, 2, 3], 3) == [0, 1, 2]
        assert tree.match([1, 3], 2) == [0] and tree.match([1, 9, 3], 3) == [0]


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
