"""Where keys and values live: `KVCacheManager`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from impls.seams.arm import Arm


class KVCacheManager(ABC):
    """Metadata only: which blocks a sequence holds. Contiguous is one block of max_model_len per sequence."""

    block_size: int
    num_blocks: int
    capacity_tokens: int  # what the budget buys, before it is cut into blocks

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return []

    @abstractmethod
    def allocate(self, seq_id: str, num_tokens: int) -> bool:
        """Hold blocks for positions 0..num_tokens-1, all or nothing; False leaves everything as it was."""

    @abstractmethod
    def can_allocate(self, seq_id: str, num_tokens: int) -> bool: ...

    @abstractmethod
    def commit(self, seq_id: str, num_computed_tokens: int) -> None:
        """These positions are written and verified; whatever was allocated past them stays reserved."""

    @abstractmethod
    def free(self, seq_id: str) -> None: ...

    @abstractmethod
    def block_table(self, seq_id: str) -> Seq[int]: ...

    @abstractmethod
    def reserved_tokens(self, seq_id: str) -> int:
        """Positions held by this sequence: blocks x block size (max_model_len for contiguous)."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int: ...

    @abstractmethod
    def check_invariants(self) -> None:
        """Recompute every derived quantity and raise AssertionError where one is off."""

    def never_fits(self, num_tokens: int) -> bool:
        """True if a sequence of that length could not be held even by an empty cache."""
        return -(-num_tokens // self.block_size) > self.num_blocks


@dataclass(frozen=True)
class KVReservation:
    """One sequence's hold on the cache in one step, in positions; split once its final length is known."""

    request_id: str
    reserved: int
    used: int
    finished: bool
