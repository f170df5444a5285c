"""Blocks found by the hash of their tokens and of the block before (vLLM's automatic prefix caching)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from impls.kv_cache.sharing import sharing_reasons
from impls.seams import Arm, PrefixIndex

START = 0  # what stands before the first block


@dataclass(eq=False, slots=True)
class _Entry:
    """One content: its number, which no other ever has, its key, and the blocks that hold a copy of it."""

    number: int
    key: tuple[int, tuple[int, ...]]
    blocks: list[int]


class HashChain(PrefixIndex):
    """One flat table. A block's key is (number of the entry before it, its own tokens), so equal tokens behind
    different starts are different entries.

    Python's dict hashes the key and then compares it, tokens and all: two contents whose hashes collide cost a
    comparison and can never pass for each other (a bare hash as the key could, and a predictable one can be made to:
    vllm#12621). An entry that comes back after its eviction has a new number, so that nothing found behind the old one
    is found behind it.
    """

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._last_number = START
        self._entries: dict[tuple[int, tuple[int, ...]], _Entry] = {}
        self._entry_of: dict[int, _Entry] = {}

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return sharing_reasons(arm)

    def match(self, token_ids: Seq[int], max_blocks: int) -> list[int]:
        entries, size = self._entries, self._block_size
        found: list[int] = []
        number = START
        for start in range(0, max_blocks * size, size):
            entry = entries.get((number, tuple(token_ids[start : start + size])))
            if entry is None:
                break
            found.append(entry.blocks[0])
            number = entry.number
        return found

    def publish(self, token_ids: Seq[int], block: int, after: int | None) -> int | None:
        key = (START if after is None else self._entry_of[after].number, tuple(token_ids))
        entry = self._entries.get(key)
        if entry is None:
            self._last_number += 1
            entry = self._entries[key] = _Entry(self._last_number, key, [])
        entry.blocks.append(block)
        self._entry_of[block] = entry
        return entry.blocks[0] if len(entry.blocks) > 1 else None

    def keep(self, block: int) -> bool:
        entry = self._entry_of.get(block)
        if entry is None:
            return False
        if len(entry.blocks) == 1:
            return True
        entry.blocks.remove(block)
        del self._entry_of[block]
        return False

    def evict(self, block: int) -> None:
        del self._entries[self._entry_of.pop(block).key]

    def clear(self) -> None:
        self._entries.clear()
        self._entry_of.clear()

    def contents(self) -> dict[int, tuple[int, ...]]:
        by_number = {entry.number: entry for entry in self._entries.values()}
        assert len(by_number) == len(self._entries), "two entries have one number"
        copies = sum(len(entry.blocks) for entry in self._entries.values())
        assert copies == len(self._entry_of), "a block without an entry, or an entry without a block"
        found = {}
        for block, entry in self._entry_of.items():
            assert block in entry.blocks and self._entries[entry.key] is entry, f"block {block} is lost"
            tokens: tuple[int, ...] = ()
            while True:
                number, own = entry.key
                assert len(own) == self._block_size, f"block {block} is not full"
                tokens = own + tokens
                if number == START:
                    break
                assert number in by_number, f"block {block} follows an entry that is gone"
                entry = by_number[number]
            found[block] = tokens
        return found
