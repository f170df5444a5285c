"""Where keys and values live: `KVCacheManager`, `PrefixIndex`, by which sequences share what is equal, and `SwapSpace`,
where those of preempted sequences wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from impls.seams.arm import Arm
from impls.seams.attention import LayerCache


class KVCacheManager(ABC):
    """Metadata only: which blocks a sequence holds. Contiguous is one block of max_model_len per sequence."""

    block_size: int
    num_blocks: int
    capacity_tokens: int  # what the budget buys, before it is cut into blocks
    can_fork: bool = False  # can a sequence begin as the copy of another

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        """Reasons why the arm cannot run with this option; empty if it can."""
        return []

    @property
    def shared_tokens(self) -> int:
        """Positions that sequences hold in common, each counted once less than it has holders."""
        return 0

    @abstractmethod
    def begin(
        self, seq_id: str, token_ids: Seq[int], max_total_tokens: int | None = None, *, reuse: bool = True
    ) -> int:
        """Open a sequence with what the cache knows of its start: how many positions need not be computed, at most
        ``len(token_ids) - 1``. Undone by `free`. ``max_total_tokens``: how long it can become, where that is known.

        ``token_ids`` is kept and read again by `commit`, which lets others share what is written: its owner appends
        verified tokens before it commits them, and changes nothing else. A sequence that is only allocated shares
        nothing. ``reuse=False``: it brings its own keys and values along (from host memory, from another worker), so
        nothing is looked up, and every block is its own until its next `commit` lets others share what came with it.
        """

    def fork(self, seq_id: str, token_ids: Seq[int], source: str, num_tokens: int) -> bool:
        """As `begin`, where its first ``num_tokens`` positions are those of ``source``: both hold the full blocks of
        them. Nobody writes to a block that others hold, so what is left of these positions, less than a block, begins a
        block of its own: copied from the one that follows the full ones in the table of ``source``, as soon as that is
        allocated. False, and nothing opened, if ``source`` has not committed so many. Only where `can_fork`.
        """
        return False

    def num_cached_tokens(self, token_ids: Seq[int]) -> int:
        """What `begin` would find of these tokens now."""
        return 0

    @abstractmethod
    def allocate(self, seq_id: str, num_tokens: int) -> bool:
        """Hold blocks for positions 0..num_tokens-1, all or nothing; False leaves everything as it was."""

    @abstractmethod
    def commit(self, seq_id: str, num_computed_tokens: int) -> None:
        """These positions are written and verified; whatever was allocated past them stays reserved."""

    @abstractmethod
    def free(self, seq_id: str) -> None:
        """Give up its blocks. What was committed of them may still serve a later `begin`, until its room is wanted."""

    @abstractmethod
    def share_prefixes(self, index: PrefixIndex) -> None:
        """Let sequences that begin alike hold the same blocks, found by ``index``. Before the first `begin`."""

    @abstractmethod
    def reset_prefixes(self) -> None:
        """Forget whatever could be shared. Sequences keep their blocks, and share nothing of them later."""

    @abstractmethod
    def block_table(self, seq_id: str) -> array[int]:
        """Of int32, as a step's tensors have them: a step of long sequences converts none."""

    @abstractmethod
    def reserved_tokens(self, seq_id: str) -> int:
        """Positions held by this sequence: blocks x block size (max_model_len for contiguous)."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, those included that are kept for a later `begin`."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Recompute every derived quantity and raise AssertionError where one is off."""

    def never_fits(self, num_tokens: int) -> bool:
        """True if a sequence of that length could not be held even by an empty cache."""
        return -(-num_tokens // self.block_size) > self.num_blocks


class PrefixIndex(ABC):
    """Which block holds the K/V of which tokens, given all tokens before them. Full blocks only.

    It maps content to blocks and knows neither sequences nor recency: the cache counts holders and chooses what to
    evict. Two sequences may compute the same content side by side; each has its own copy, and the content is known as
    long as one copy is. Whoever holds a block holds a copy of everything before it; of what nobody holds, one copy is
    kept. So the cache can promise to evict what follows a block before the block itself.
    """

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        """Reasons why the arm cannot run with this option; empty if it can."""
        return []

    @abstractmethod
    def match(self, token_ids: Seq[int], max_blocks: int) -> list[int]:
        """Blocks of the longest known start of ``token_ids``, at most ``max_blocks``; of each a copy."""

    @abstractmethod
    def publish(self, token_ids: Seq[int], block: int, after: int | None) -> int | None:
        """``block`` holds these tokens, one block of them, behind those of the published block ``after`` (None: at the
        start). A copy of the same that was known before, None if there was none."""

    @abstractmethod
    def keep(self, block: int) -> bool:
        """Nobody holds it any more. True if it is the only copy of its content; else it is unknown, or forgotten."""

    @abstractmethod
    def evict(self, block: int) -> None:
        """Forget a block that `keep` kept; nothing known follows it."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def contents(self) -> dict[int, tuple[int, ...]]:
        """All tokens from the start through the end of each known block, for checks. AssertionError for a broken
        structure."""


@dataclass(frozen=True)
class KVReservation:
    """One sequence's hold on the cache in one step, in positions; split once its final length is known."""

    request_id: str
    reserved: int
    used: int
    finished: bool


class BlockStorage(Protocol):
    """Keys and values by block; several processes may look at one that lies in shared memory."""

    def export(self, blocks: Seq[int]) -> Tensor:
        """A copy of whole blocks, for `import_` of a storage of the same shape."""

    def import_(self, blocks: Seq[int], data: Tensor) -> None:
        """Write what `export` gave to as many blocks, in the same order."""

    def empty(self, num_blocks: int) -> Tensor:
        """Unfilled memory for what `export` gives of so many blocks."""


class LayerStorage(Protocol):
    """Keys and values of each layer, or what else is kept for each position, in the sequences' blocks:
    [num_blocks, block_size, num_kv_heads, head_dim] each."""

    num_blocks: int
    block_size: int

    def k(self, layer: int) -> LayerCache: ...

    def v(self, layer: int) -> LayerCache: ...

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """k, v: [T, num_kv_heads, head_dim]; slot_mapping: as `StepBatch`'s."""


# Writes a sequence's keys and values to these blocks of the storage; bytes copied.
Fetch = Callable[[BlockStorage, Seq[int]], int]


class SwapSpace(Protocol):
    """Where the keys and values of sequences wait that hold no blocks: taken out here, or begun by another engine.

    route: what a copy crosses, for the record.
    """

    route: str

    def expect(self, seq_id: str, fetch: Fetch) -> None:
        """Its keys and values lie elsewhere until `swap_in`, which fetches them."""

    def swap_out(self, seq_id: str, blocks: Seq[int]) -> int:
        """Keep a copy of these blocks; bytes copied."""

    def swap_in(self, seq_id: str, blocks: Seq[int]) -> int:
        """Write what was kept to these blocks, as many and in the same order, and keep it no longer; bytes copied.

        KeyError for a sequence of which nothing is kept.
        """

    def copy(self, blocks: Seq[tuple[int, int]]) -> None:
        """Within the cache, each (from, to): none of those copied from is copied to."""

    def drop(self, seq_id: str) -> None:
        """It will not run again; nothing may be kept of it."""

    @property
    def kept_bytes(self) -> int:
        """In host memory now."""
