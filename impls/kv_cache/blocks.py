"""What every block-based cache manager shares: a free list and one append-only block table per sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from impls.seams import Arm, KVCacheManager


class BlockManager(KVCacheManager):
    """Equal blocks of ``block_size`` positions, handed out from a last-in-first-out free list in O(1) each.

    A block belongs to at most one sequence. A table only grows while its sequence lives, so whoever has copied a
    prefix of it never has to look at that prefix again. ``budget_bytes`` buys ``capacity_tokens`` positions at
    ``bytes_per_token`` (`ModelShape.kv_bytes_per_token`); what does not fill a whole block is left unusable.

    Raises ValueError if the budget buys no block, KeyError for a sequence that holds nothing (freed twice, unknown).
    """

    def __init__(self, *, budget_bytes: int, bytes_per_token: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.capacity_tokens = budget_bytes // bytes_per_token
        self.num_blocks = self.capacity_tokens // block_size
        reasons = budget_reasons(self.capacity_tokens, block_size)
        if reasons:
            raise ValueError("; ".join(reasons))
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._tables: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}

    def allocate(self, seq_id: str, num_tokens: int) -> bool:
        if not 0 < num_tokens <= self.max_model_len:
            raise ValueError(f"{seq_id}: {num_tokens} tokens lie outside 1..{self.max_model_len} (max_model_len)")
        table = self._tables.get(seq_id)
        missing = -(-num_tokens // self.block_size) - (len(table) if table else 0)
        if missing <= 0:
            return True
        free = self._free
        if missing > len(free):
            return False
        if table is None:
            table = self._tables[seq_id] = []
            self._computed[seq_id] = 0
        table += free[: -missing - 1 : -1]  # as many times pop, at C speed
        del free[-missing:]
        return True

    def can_allocate(self, seq_id: str, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.block_size) - len(self._tables.get(seq_id, ()))
        return num_tokens <= self.max_model_len and missing <= len(self._free)

    def commit(self, seq_id: str, num_computed_tokens: int) -> None:
        """Raises ValueError past the reservation, or below what was committed: a verified position stays verified."""
        committed = self._computed[seq_id]
        if not committed <= num_computed_tokens <= len(self._tables[seq_id]) * self.block_size:
            raise ValueError(
                f"{seq_id}: commit of {num_computed_tokens} lies outside {committed}..{self.reserved_tokens(seq_id)}"
            )
        self._computed[seq_id] = num_computed_tokens

    def free(self, seq_id: str) -> None:
        table = self._tables.pop(seq_id)
        del self._computed[seq_id]
        self._free.extend(reversed(table))  # reversed: a run of neighbouring blocks is handed out as one again

    def block_table(self, seq_id: str) -> Seq[int]:
        """The live table: to be read only; it grows with the next `allocate` and is not touched by `free`."""
        return self._tables[seq_id]

    def reserved_tokens(self, seq_id: str) -> int:
        return len(self._tables[seq_id]) * self.block_size

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def check_invariants(self) -> None:
        free = set(self._free)
        held = [block for table in self._tables.values() for block in table]
        _require(len(free) == len(self._free), "a block is in the free list twice")
        _require(len(set(held)) == len(held), "a block is in two tables, or twice in one")
        _require(free.isdisjoint(held), "a block is both free and held")
        _require(free | set(held) == set(range(self.num_blocks)), "blocks lost or invented: free + held != all")
        _require(self._tables.keys() == self._computed.keys(), "a table without a count, or a count without a table")
        for seq_id, table in self._tables.items():
            _require(bool(table), f"{seq_id} holds an empty table")
            _require((len(table) - 1) * self.block_size < self.max_model_len, f"{seq_id} holds more than max_model_len")
            _require(0 <= self._computed[seq_id] <= len(table) * self.block_size, f"{seq_id}: computed past its table")


def budget_reasons(capacity_tokens: int, block_size: int) -> list[str]:
    """Why a budget of so many tokens cannot be cut into blocks."""
    if capacity_tokens >= block_size:
        return []
    return [f"kv_cache.budget buys {capacity_tokens} tokens, fewer than one block of {block_size}: raise the budget"]


def arm_capacity_tokens(arm: Arm) -> int:
    """Positions that the arm's budget buys at its model's K/V size."""
    return arm.kv_budget_bytes // arm.model.kv_bytes_per_token(arm.element_bytes)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
