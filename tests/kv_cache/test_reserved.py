"""One piece a sequence: the buddy allocator and the reservations of the vLLM paper's baselines."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from impls.kv_cache.buddy import BuddyAllocator, order_of
from impls.kv_cache.reserved import ExactCache, Pow2Cache, ReservedCache
from impls.seams import Arm, ModelShape

SIZE = 44  # 32 + 8 + 4
LONGEST = 30


class BuddyMachine(RuleBasedStateMachine):
    """The model is a row of units: a piece of 2**k fits where an aligned run of so many lies free in one."""

    def __init__(self) -> None:
        super().__init__()
        self.buddy = BuddyAllocator(SIZE)
        self.pieces: list[range] = []

    def fits(self, count: int) -> bool:
        piece = 1 << order_of(count)
        taken = {unit for held in self.pieces for unit in held}
        tops = (range(0, 32), range(32, 40), range(40, 44))
        runs = (range(a, a + piece) for top in tops for a in range(top.start, top.stop - piece + 1, piece))
        return any(taken.isdisjoint(run) for run in runs)

    @rule(count=st.integers(1, SIZE))
    def allocate(self, count: int) -> None:
        fits = self.fits(count)
        piece = self.buddy.allocate(count)
        assert (piece is not None) is fits
        if piece is not None:
            assert len(piece) == 1 << order_of(count) and count <= len(piece) < 2 * count
            assert not any(set(piece) & set(held) for held in self.pieces)
            self.pieces.append(piece)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.pieces:
            piece = self.pieces.pop(data.draw(st.integers(0, len(self.pieces) - 1)))
            self.buddy.free(piece.start)
            with pytest.raises(KeyError):
                self.buddy.free(piece.start)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.buddy.check_invariants()
        assert self.buddy.num_free == SIZE - sum(map(len, self.pieces))


TestBuddy = BuddyMachine.TestCase
TestBuddy.settings = settings(max_examples=60, stateful_step_count=40)


class ReservedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.kv: ReservedCache = Pow2Cache(budget_bytes=SIZE, bytes_per_token=1, max_model_len=LONGEST, block_size=1)
        self.held: dict[str, int] = {}

    @rule(seq_id=st.sampled_from("abcdef"), prompt=st.integers(1, LONGEST - 1), output=st.integers(1, LONGEST))
    def admit(self, seq_id: str, prompt: int, output: int) -> None:
        total = min(prompt + output, LONGEST)
        if seq_id in self.held:
            with pytest.raises(ValueError, match="has begun"):
                self.kv.begin(seq_id, range(prompt), total)
            return
        assert self.kv.begin(seq_id, range(prompt), total) == 0
        reserves = min(prompt + (1 << order_of(total - prompt)), LONGEST)
        fits = deepcopy(self.kv._pieces).allocate(reserves) is not None
        if self.kv.allocate(seq_id, prompt) is not fits or not fits:
            self.kv.free(seq_id)
            assert not fits
        else:
            self.held[seq_id] = total
            assert self.kv.reserved_tokens(seq_id) == 1 << order_of(reserves)

    @rule(seq_id=st.sampled_from("abcdef"), data=st.data())
    def grow(self, seq_id: str, data: st.DataObject) -> None:
        """Whatever else is held, there is room for all that it may ever become."""
        if seq_id in self.held:
            before = list(self.kv.block_table(seq_id))
            num_tokens = data.draw(st.integers(1, self.held[seq_id]))
            assert self.kv.allocate(seq_id, num_tokens)
            assert list(self.kv.block_table(seq_id)) == before

    @rule(seq_id=st.sampled_from("abcdef"))
    def free(self, seq_id: str) -> None:
        if self.held.pop(seq_id, None):
            self.kv.free(seq_id)
        for call in (self.kv.free, self.kv.block_table, self.kv.reserved_tokens):
            with pytest.raises(KeyError):
                call(seq_id)

    @invariant()
    def is_sound(self) -> None:
        self.kv.check_invariants()


TestReserved = ReservedMachine.TestCase
TestReserved.settings = settings(max_examples=40, stateful_step_count=40)


def build(kind: type[ReservedCache], tokens: int, block_size: int = 1, longest: int = 2048) -> ReservedCache:
    return kind(budget_bytes=tokens, bytes_per_token=1, max_model_len=longest, block_size=block_size)


def test_the_papers_example_of_25_output_tokens_reserves_32() -> None:
    for kind, reserved in ((Pow2Cache, 7 + 32), (ExactCache, 7 + 25)):
        kv = build(kind, 4096)
        assert kv.reserves(7, 7 + 25) == reserved
    assert build(Pow2Cache, 4096).reserves(7, 7 + 32) == 7 + 32 and build(Pow2Cache, 4096).reserves(7, 7 + 1) == 8


def test_what_a_piece_does_not_hold_is_refused() -> None:
    kv = build(ExactCache, 64, longest=40)
    kv.begin("a", range(4), 9)
    assert kv.allocate("a", 4) and kv.reserved_tokens("a") == 16
    kv.commit("a", 9)
    for wrong in (8, 17):
        with pytest.raises(ValueError, match="lies outside"):
            kv.commit("a", wrong)
    with pytest.raises(ValueError, match="do not fit its piece of 16"):
        kv.allocate("a", 17)
    with pytest.raises(ValueError, match="max_model_len"):
        kv.allocate("a", 41)
    with pytest.raises(ValueError, match="no block that another could share"):
        kv.share_prefixes(None)  # type: ignore[arg-type]


def test_blocks_are_the_unit_of_a_piece() -> None:
    kv = build(ExactCache, 1000, 16, 256)
    assert (kv.num_blocks, kv.num_free_blocks) == (62, 62)
    kv.begin("a", range(4), 70)
    assert kv.allocate("a", 4) and kv.reserved_tokens("a") == 128, "5 blocks of 16, in a piece of 8"
    assert list(kv.block_table("a")) == list(range(kv.block_table("a")[0], kv.block_table("a")[0] + 8))
    kv.free("a")
    assert kv.num_free_blocks == 62


def arm(option: str, budget_tokens: int, batching: str = "continuous", **changes: Any) -> Arm:
    conf = Path(__file__).parents[2] / "conf" / "kv_cache" / f"{option}.yaml"
    shape = ModelShape(64, 8, 8, 3, 2, 1, 4, 512)
    config = {**yaml.safe_load(conf.read_text()), **changes}
    axes = {"kv_cache": config, "batching": {"name": batching}}
    return Arm(axes, shape, 40, "cpu", budget_tokens * shape.kv_bytes_per_token())


@pytest.mark.parametrize(("option", "kind"), [("exact", ExactCache), ("pow2", Pow2Cache)])
def test_validate(option: str, kind: type[ReservedCache]) -> None:
    assert kind.validate(arm(option, 64)) == []
    (why,) = kind.validate(arm(option, 63))
    assert why.startswith("kv_cache.budget buys 63 tokens, no piece of 64 that the longest sequence needs")
    assert kind.validate(arm(option, 63, block_size=1)) and not kind.validate(arm(option, 64, block_size=1))
    (why,) = kind.validate(arm(option, 64, batching="static"))
    assert why.startswith("needs another batching than static")
    assert kind.validate(arm(option, 64, block_size=0)) == ["kv_cache.block_size=0: must be an integer of at least 1"]
    with pytest.raises(ValueError, match="no piece of 64"):
        build(kind, 63, 16, 40)
