"""Blocks that outlive their sequence: what a prefill worker has computed stays until another has copied it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from impls.seams import KVCacheManager

if TYPE_CHECKING:
    _Base = KVCacheManager
else:
    _Base = object


class HeldBlocks(_Base):
    """Mixed into a cache manager (`holding`): who is held keeps its blocks through `free`, until `let_go`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._held: dict[str, int] = {}

    def hold(self, seq_id: str, num_tokens: int) -> tuple[int, ...]:
        """It has computed ``num_tokens`` positions and is about to be freed; the blocks that hold them, in order."""
        self._held[seq_id] = num_tokens
        return tuple(self.block_table(seq_id)[: -(-num_tokens // self.block_size)])

    def free(self, seq_id: str) -> None:
        if seq_id not in self._held:
            super().free(seq_id)  # type: ignore[safe-super]  # of the manager that this is mixed into

    def let_go(self, seq_id: str) -> None:
        """Free what is held; nothing where nothing is."""
        if self._held.pop(seq_id, None) is not None:
            super().free(seq_id)  # type: ignore[safe-super]

    @property
    def held(self) -> Seq[tuple[str, int]]:
        """Sequences that are held, and how many positions each has computed."""
        return list(self._held.items())


def holding(manager: Any) -> Any:
    """The same class of cache manager, with `HeldBlocks`."""
    return type(f"Holding{manager.__name__}", (HeldBlocks, manager), {})
