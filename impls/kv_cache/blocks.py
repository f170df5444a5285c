"""What every block-based cache manager shares: a free list and one append-only block table per sequence."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq

from impls.seams import Arm, KVCacheManager, PrefixIndex


class BlockManager(KVCacheManager):
    """Equal blocks of ``block_size`` positions, handed out from a last-in-first-out free list in O(1) each.

    A table only grows while its sequence lives, so whoever has copied a prefix of it never has to look at that prefix
    again. ``budget_bytes`` buys ``capacity_tokens`` positions at ``bytes_per_token`` (`ModelShape.kv_bytes_per_token`);
    what does not fill a whole block is left unusable.

    A block belongs to one sequence, unless a `fork` or a `PrefixIndex` lets several hold it. That is only ever a block
    that is full and committed, to which nobody writes any more: drafts and the token to come lie behind what is
    committed. With an index it is published then, and when its last holder goes, it stays behind as *cached* until its
    room is wanted, the least recently released first. A sequence releases its last block first, so nothing is evicted
    before what follows it.

    Raises ValueError if the budget buys no block, KeyError for a sequence that holds nothing (freed twice, unknown).
    """

    can_fork = True

    def __init__(self, *, budget_bytes: int, bytes_per_token: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.capacity_tokens = budget_bytes // bytes_per_token
        self.num_blocks = self.capacity_tokens // block_size
        reasons = budget_reasons(self.capacity_tokens, block_size)
        if reasons:
            raise ValueError("; ".join(reasons))
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._tables: dict[str, array[int]] = {}
        self._computed: dict[str, int] = {}
        self._index: PrefixIndex | None = None
        self._tokens: dict[str, Seq[int]] = {}  # of the sequences that publish: their owners' own, live
        self._extra_holders: dict[int, int] = {}  # of a block that more than one sequence holds: how many more
        self._cached: OrderedDict[int, None] = OrderedDict()  # published and held by nobody; evicted from the front
        self._num_shared = 0  # the sum of _extra_holders

    def begin(
        self, seq_id: str, token_ids: Seq[int], max_total_tokens: int | None = None, *, reuse: bool = True
    ) -> int:
        """Raises ValueError for a sequence that holds blocks already."""
        if seq_id in self._tables:
            raise ValueError(f"{seq_id} has begun already")
        table = array("i")
        if self._index is not None:
            if reuse:
                table.extend(self._index.match(token_ids, (len(token_ids) - 1) // self.block_size))
                self._hold(table)
            self._tokens[seq_id] = token_ids
        self._tables[seq_id] = table
        self._computed[seq_id] = len(table) * self.block_size
        return self._computed[seq_id]

    def fork(self, seq_id: str, token_ids: Seq[int], source: str, num_tokens: int) -> bool:
        """Raises ValueError for a sequence that holds blocks already."""
        if seq_id in self._tables:
            raise ValueError(f"{seq_id} has begun already")
        if num_tokens > self._computed[source]:
            return False
        table = self._tables[source][: num_tokens // self.block_size]
        self._hold(table)
        if source in self._tokens:
            self._tokens[seq_id] = token_ids
        self._tables[seq_id] = table
        self._computed[seq_id] = len(table) * self.block_size
        return True

    def num_cached_tokens(self, token_ids: Seq[int]) -> int:
        if self._index is None:
            return 0
        return len(self._index.match(token_ids, (len(token_ids) - 1) // self.block_size)) * self.block_size

    def allocate(self, seq_id: str, num_tokens: int) -> bool:
        if not 0 < num_tokens <= self.max_model_len:
            raise ValueError(f"{seq_id}: {num_tokens} tokens lie outside 1..{self.max_model_len} (max_model_len)")
        table = self._tables.get(seq_id)
        missing = -(-num_tokens // self.block_size) - (len(table) if table else 0)
        if missing <= 0:
            return True
        free = self._free
        if missing > len(free) and not self._reclaim(missing - len(free)):
            return False
        if table is None:
            table = self._tables[seq_id] = array("i")
            self._computed[seq_id] = 0
        table.extend(free[: -missing - 1 : -1])  # as many times pop, at C speed
        del free[-missing:]
        return True

    def commit(self, seq_id: str, num_computed_tokens: int) -> None:
        """Raises ValueError past the reservation, or below what was committed: a verified position stays verified."""
        committed = self._computed[seq_id]
        if not committed <= num_computed_tokens <= len(self._tables[seq_id]) * self.block_size:
            raise ValueError(
                f"{seq_id}: commit of {num_computed_tokens} lies outside {committed}..{self.reserved_tokens(seq_id)}"
            )
        self._computed[seq_id] = num_computed_tokens
        if seq_id in self._tokens:
            self._publish(seq_id, committed // self.block_size, num_computed_tokens // self.block_size)

    def free(self, seq_id: str) -> None:
        table = self._tables.pop(seq_id)
        del self._computed[seq_id]
        self._tokens.pop(seq_id, None)
        if self._index is None and not self._extra_holders:
            self._free.extend(reversed(table))  # reversed: a run of neighbouring blocks is handed out as one again
        else:
            self._let_go(table)

    def share_prefixes(self, index: PrefixIndex) -> None:
        self._index = index

    def reset_prefixes(self) -> None:
        if self._index is not None:
            self._index.clear()
            self._free.extend(self._cached)
            self._cached.clear()
            self._tokens.clear()

    # --- blocks that sequences share ----------------------------------------------------------------------------------

    def _hold(self, blocks: Seq[int]) -> None:
        """Full blocks find a further holder, or the first since they were left behind."""
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
            else:
                self._extra_holders[block] = self._extra_holders.get(block, 0) + 1
                self._num_shared += 1

    def _let_go(self, table: Seq[int]) -> None:
        for block in reversed(table):
            extra = self._extra_holders.get(block)
            if extra is not None:
                self._num_shared -= 1
                if extra == 1:
                    del self._extra_holders[block]
                else:
                    self._extra_holders[block] = extra - 1
            elif self._index is not None and self._index.keep(block):
                self._cached[block] = None
            else:
                self._free.append(block)

    def _publish(self, seq_id: str, first: int, end: int) -> None:
        """The blocks first..end-1 of its table have been filled and verified."""
        index, size = self._index, self.block_size
        assert index is not None
        tokens, table = self._tokens[seq_id], self._tables[seq_id]
        for i in range(first, end):
            copy = index.publish(tokens[i * size : (i + 1) * size], table[i], table[i - 1] if i else None)
            if copy is not None and copy in self._cached:  # one that is held has come: the other need not be kept
                del self._cached[copy]
                index.keep(copy)
                self._free.append(copy)

    def _reclaim(self, count: int) -> bool:
        """Evict that many cached blocks, or none and False if there are fewer."""
        if count > len(self._cached):
            return False
        assert self._index is not None
        for _ in range(count):
            block, _ = self._cached.popitem(last=False)
            self._index.evict(block)
            self._free.append(block)
        return True

    # --- what it holds ------------------------------------------------------------------------------------------------

    def block_table(self, seq_id: str) -> array[int]:
        """The live table: to be read only; it grows with the next `allocate` and is not touched by `free`."""
        return self._tables[seq_id]

    def reserved_tokens(self, seq_id: str) -> int:
        return len(self._tables[seq_id]) * self.block_size

    @property
    def shared_tokens(self) -> int:
        return self._num_shared * self.block_size

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._cached)

    def check_invariants(self) -> None:
        free, cached = set(self._free), set(self._cached)
        held = Counter(block for table in self._tables.values() for block in table)
        extra = {block: count - 1 for block, count in held.items() if count > 1}
        _require(len(free) == len(self._free), "a block is in the free list twice")
        _require(extra == self._extra_holders, "a block is in two tables that do not share it, or twice in one")
        _require(self._num_shared == sum(extra.values()), "the number of shared blocks is off")
        _require(free.isdisjoint(held), "a block is both free and held")
        _require(cached.isdisjoint(held), "a block is both held and cached")
        _require(free.isdisjoint(cached), "a block is both free and cached")
        everything = free | cached | held.keys()
        _require(everything == set(range(self.num_blocks)), "blocks lost or invented: free + cached + held != all")
        _require(self._tables.keys() == self._computed.keys(), "a table without a count, or a count without a table")
        _require(self._tokens.keys() <= self._tables.keys(), "tokens without a table")
        self._check_contents()
        for seq_id, table in self._tables.items():
            _require(bool(table), f"{seq_id} holds an empty table")
            _require((len(table) - 1) * self.block_size < self.max_model_len, f"{seq_id} holds more than max_model_len")
            _require(0 <= self._computed[seq_id] <= len(table) * self.block_size, f"{seq_id}: computed past its table")


    def _check_contents(self) -> None:
        """What is published is full, verified, never written again, and goes after whatever follows it."""
        contents = {} if self._index is None else self._index.contents()
        _require(contents.keys().isdisjoint(self._free), "a published block is free")
        _require(self._cached.keys() <= contents.keys(), "a cached block is not published")
        kept = [contents[block] for block in self._cached]
        _require(len(set(kept)) == len(kept), "two cached blocks hold the same")
        order = {content: nth for nth, content in enumerate(kept)}
        for content in contents.values():
            before = content[: -self.block_size]
            if before in order:
                _require(order.get(content, len(kept)) < order[before], "a block would be evicted before what follows")
        for seq_id, table in self._tables.items():
            tokens, full = self._tokens.get(seq_id), self._computed[seq_id] // self.block_size
            for i, block in enumerate(table):
                if tokens is not None and i < full:
                    expected = tuple(tokens[: (i + 1) * self.block_size])
                    _require(contents.get(block) == expected, f"{seq_id}: block {i} is not published as what it holds")
                else:
                    known = tokens is not None and block in contents
                    shared = i >= full and block in self._extra_holders
                    _require(not known and not shared, f"{seq_id}: shares block {i}, to which it will write")


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
