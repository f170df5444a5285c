"""Both cache managers against a naive model, every derived quantity recomputed after every operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from impls.kv_cache.blocks import BlockManager
from impls.kv_cache.contiguous import ContiguousCache
from impls.kv_cache.paged import PagedCache
from impls.seams import Arm, ModelShape

MAX_MODEL_LEN = 20
IDS = st.sampled_from("abcdef")


class BlockMachine(RuleBasedStateMachine):
    """The model knows, of each sequence, the blocks it has seen and the positions committed; nothing of a free list."""

    def build(self) -> BlockManager:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.kv = self.build()
        self.tables: dict[str, list[int]] = {}
        self.committed: dict[str, int] = {}

    def free_blocks(self) -> int:
        return self.kv.num_blocks - sum(len(table) for table in self.tables.values())

    @rule(seq_id=IDS, num_tokens=st.integers(1, MAX_MODEL_LEN))
    def allocate(self, seq_id: str, num_tokens: int) -> None:
        held = self.tables.get(seq_id, [])
        wanted = -(-num_tokens // self.kv.block_size)
        fits = wanted - len(held) <= self.free_blocks()
        assert self.kv.allocate(seq_id, num_tokens) is fits
        if fits:
            table = list(self.kv.block_table(seq_id))
            assert table[: len(held)] == held, "a table is append-only"
            assert len(table) == max(wanted, len(held))
            self.tables[seq_id] = table
            self.committed.setdefault(seq_id, 0)

    @rule(seq_id=IDS, num_tokens=st.sampled_from([-1, 0, MAX_MODEL_LEN + 1, 10**9]))
    def allocate_outside(self, seq_id: str, num_tokens: int) -> None:
        with pytest.raises(ValueError, match="max_model_len"):
            self.kv.allocate(seq_id, num_tokens)

    @rule(seq_id=IDS)
    def free(self, seq_id: str) -> None:
        if seq_id in self.tables:
            self.kv.free(seq_id)
            del self.tables[seq_id], self.committed[seq_id]
        for call in (self.kv.free, self.kv.block_table, self.kv.reserved_tokens):  # freed twice, or never known
            with pytest.raises(KeyError):
                call(seq_id)
        with pytest.raises(KeyError):
            self.kv.commit(seq_id, 0)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tables)))
        reserved = len(self.tables[seq_id]) * self.kv.block_size
        position = data.draw(st.integers(-1, reserved + 1))
        if self.committed[seq_id] <= position <= reserved:
            self.kv.commit(seq_id, position)
            self.committed[seq_id] = position
        else:
            with pytest.raises(ValueError, match="lies outside"):
                self.kv.commit(seq_id, position)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.kv.check_invariants()
        assert self.kv.num_free_blocks == self.free_blocks()
        held = [block for table in self.tables.values() for block in table]
        assert len(set(held)) == len(held), "two sequences share a block"
        for seq_id, table in self.tables.items():
            assert list(self.kv.block_table(seq_id)) == table
            assert self.kv.reserved_tokens(seq_id) == len(table) * self.kv.block_size


class PagedMachine(BlockMachine):
    def build(self) -> BlockManager:
        return PagedCache(budget_bytes=2 * 47, bytes_per_token=2, max_model_len=MAX_MODEL_LEN, block_size=3)


class ContiguousMachine(BlockMachine):
    def build(self) -> BlockManager:
        return ContiguousCache(budget_bytes=2 * 75, bytes_per_token=2, max_model_len=MAX_MODEL_LEN)


TestPaged = PagedMachine.TestCase
TestContiguous = ContiguousMachine.TestCase
TestPaged.settings = TestContiguous.settings = settings(
    max_examples=50, stateful_step_count=40
)


def test_the_budget_in_tokens_and_blocks() -> None:
    paged = PagedCache(budget_bytes=1007, bytes_per_token=10, max_model_len=40)
    assert (paged.capacity_tokens, paged.block_size, paged.num_blocks) == (100, 16, 6)
    contiguous = ContiguousCache(budget_bytes=1007, bytes_per_token=10, max_model_len=40)
    assert (contiguous.capacity_tokens, contiguous.block_size, contiguous.num_blocks) == (100, 40, 2)
    assert not paged.never_fits(96) and paged.never_fits(97)
    for cache in (PagedCache, ContiguousCache):
        with pytest.raises(ValueError, match="buys 1 tokens, fewer than one block"):
            cache(budget_bytes=19, bytes_per_token=10, max_model_len=40)


def test_contiguous_reserves_the_whole_length_and_paged_what_is_filled() -> None:
    for cache, reserved in ((ContiguousCache, 64), (PagedCache, 32)):
        kv = cache(budget_bytes=128, bytes_per_token=1, max_model_len=64)
        assert kv.allocate("a", 17)
        assert kv.reserved_tokens("a") == reserved


def test_a_failed_allocation_leaves_everything_as_it_was() -> None:
    kv = PagedCache(budget_bytes=4, bytes_per_token=1, max_model_len=9, block_size=1)
    assert kv.allocate("a", 2)
    assert not kv.allocate("a", 5) and not kv.allocate("b", 3)
    assert kv.num_free_blocks == 2 and len(kv.block_table("a")) == 2
    with pytest.raises(KeyError):
        kv.block_table("b")


def test_neighbouring_blocks_stay_neighbours_when_they_are_reused() -> None:
    kv = PagedCache(budget_bytes=8, bytes_per_token=1, max_model_len=8, block_size=1)
    assert kv.allocate("a", 3) and kv.allocate("b", 2)
    assert list(kv.block_table("a")) == [0, 1, 2]
    held = kv.block_table("a")
    kv.free("a")
    assert list(held) == [0, 1, 2], "freeing does not touch a table that somebody still reads"
    assert kv.allocate("c", 4)
    assert list(kv.block_table("c")) == [0, 1, 2, 5]


class TestInvariantCheck:
    """`check_invariants` sees each kind of damage: the tests above rest on it."""

    DAMAGE: ClassVar[dict[str, Any]] = {
        "lost": lambda kv: kv._free.pop(),
        "twice": lambda kv: kv._free.append(kv._free[0]),
        "both free and held": lambda kv: kv._free.append(kv._tables["a"][0]),
        "two tables": lambda kv: kv._tables["b"].append(kv._tables["a"][0]),
        "invented": lambda kv: kv._tables["a"].append(99),
        "without a count": lambda kv: kv._computed.pop("a"),
        "empty table": lambda kv: kv._free.append(kv._tables["b"].pop()),
        "past its table": lambda kv: kv._computed.__setitem__("b", 99),
    }

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_sees(self, damage: str) -> None:
        kv = PagedCache(budget_bytes=32, bytes_per_token=1, max_model_len=20, block_size=4)
        assert kv.allocate("a", 9) and kv.allocate("b", 3)
        kv.check_invariants()
        self.DAMAGE[damage](kv)
        with pytest.raises(AssertionError, match=damage):
            kv.check_invariants()


def arm(option: str, budget_tokens: int, **changes: Any) -> Arm:
    conf = Path(__file__).parents[2] / "conf" / "kv_cache" / f"{option}.yaml"
    shape = ModelShape(64, 8, 8, 3, 2, 1, 4, 512)
    config = {**yaml.safe_load(conf.read_text()), **changes}
    return Arm({"kv_cache": config}, shape, 40, "cpu", budget_tokens * shape.kv_bytes_per_token())


def test_validate_says_why_a_budget_or_a_block_size_cannot_work() -> None:
    assert PagedCache.validate(arm("paged", 16)) == ContiguousCache.validate(arm("contiguous", 40)) == []
    assert PagedCache.validate(arm("paged", 15)) == [
        "kv_cache.budget buys 15 tokens, fewer than one block of 16: raise the budget"
    ]
    assert ContiguousCache.validate(arm("contiguous", 39)) == [
        "kv_cache.budget buys 39 tokens, fewer than one block of 40: raise the budget"
    ]
    for wrong in (0, -16, "16", 1.5, True):
        assert PagedCache.validate(arm("paged", 100, block_size=wrong)) == [
            f"kv_cache.block_size={wrong}: must be an integer of at least 1"
        ]
