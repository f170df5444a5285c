"""One piece per sequence, reserved when it is admitted: the baselines of the vLLM paper (Orca, Kwon et al. 2023)."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence as Seq

from impls.kv_cache.blocks import arm_capacity_tokens
from impls.kv_cache.buddy import BuddyAllocator, order_of
from impls.seams import Arm, KVCacheManager, PrefixIndex


class ReservedCache(KVCacheManager):
    """A sequence gets one piece of a buddy allocator, large enough for all positions that its rule reserves, and never
    grows out of it. To the kernels a piece is a run of blocks of ``block_size``, the unit in which it is counted.

    A sequence of which no `begin` told the final length reserves what it first asks for.

    Raises ValueError if the budget cannot hold one sequence of max_model_len, and for a sequence that outgrows its
    piece; KeyError for one that holds nothing.
    """

    def __init__(self, *, budget_bytes: int, bytes_per_token: int, max_model_len: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.capacity_tokens = budget_bytes // bytes_per_token
        self.num_blocks = self.capacity_tokens // block_size
        reasons = piece_reasons(self.capacity_tokens, block_size, max_model_len)
        if reasons:
            raise ValueError("; ".join(reasons))
        self._pieces = BuddyAllocator(self.num_blocks)
        self._tables: dict[str, array[int]] = {}
        self._wanted: dict[str, int] = {}
        self._computed: dict[str, int] = {}

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        block_size = arm.axes["kv_cache"].get("block_size", 16)
        if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
            return [f"kv_cache.block_size={block_size}: must be an integer of at least 1"]
        reasons = piece_reasons(arm_capacity_tokens(arm), block_size, arm.max_model_len)
        if arm.axes.get("batching", {}).get("name") == "static":
            reasons.append("needs another batching than static, which counts free blocks and not free pieces")
        return reasons

    @abstractmethod
    def reserves(self, num_prompt_tokens: int, max_total_tokens: int) -> int:
        """Positions that a sequence reserves, at least ``max_total_tokens``."""

    def begin(
        self, seq_id: str, token_ids: Seq[int], max_total_tokens: int | None = None, *, reuse: bool = True
    ) -> int:
        """Raises ValueError for a sequence that has begun already."""
        if seq_id in self._computed:
            raise ValueError(f"{seq_id} has begun already")
        self._computed[seq_id] = 0
        if max_total_tokens is not None:
            wanted = self.reserves(len(token_ids), min(max_total_tokens, self.max_model_len))
            self._wanted[seq_id] = min(wanted, self.max_model_len)
        return 0

    def allocate(self, seq_id: str, num_tokens: int) -> bool:
        if not 0 < num_tokens <= self.max_model_len:
            raise ValueError(f"{seq_id}: {num_tokens} tokens lie outside 1..{self.max_model_len} (max_model_len)")
        table = self._tables.get(seq_id)
        if table is None:
            piece = self._pieces.allocate(self._blocks(seq_id, num_tokens))
            if piece is None:
                return False
            table = self._tables[seq_id] = array("i", piece)
            self._computed.setdefault(seq_id, 0)
        if num_tokens > len(table) * self.block_size:
            raise ValueError(f"{seq_id}: {num_tokens} tokens do not fit its piece of {self.reserved_tokens(seq_id)}")
        return True

    def _blocks(self, seq_id: str, num_tokens: int) -> int:
        return -(-max(num_tokens, self._wanted.get(seq_id, 0)) // self.block_size)

    def commit(self, seq_id: str, num_computed_tokens: int) -> None:
        committed = self._computed[seq_id]
        if not committed <= num_computed_tokens <= self.reserved_tokens(seq_id):
            raise ValueError(
                f"{seq_id}: commit of {num_computed_tokens} lies outside {committed}..{self.reserved_tokens(seq_id)}"
            )
        self._computed[seq_id] = num_computed_tokens

    def free(self, seq_id: str) -> None:
        del self._computed[seq_id]
        self._wanted.pop(seq_id, None)
        table = self._tables.pop(seq_id, None)
        if table is not None:
            self._pieces.free(table[0])

    def share_prefixes(self, index: PrefixIndex) -> None:
        """ValueError: it cannot."""
        raise ValueError("a sequence in one piece has no block that another could share")

    def reset_prefixes(self) -> None:
        """Nothing is ever shared."""

    def block_table(self, seq_id: str) -> array[int]:
        return self._tables[seq_id]

    def reserved_tokens(self, seq_id: str) -> int:
        return len(self._tables[seq_id]) * self.block_size

    @property
    def num_free_blocks(self) -> int:
        return self._pieces.num_free

    def check_invariants(self) -> None:
        self._pieces.check_invariants()
        held = {table[0]: order_of(len(table)) for table in self._tables.values()}
        assert held == self._pieces._held, "a piece without a sequence, or a sequence without its piece"
        assert len(held) == len(self._tables), "two sequences have one piece"
        assert self._tables.keys() | self._wanted.keys() <= self._computed.keys(), "a piece without a count"
        for seq_id in self._tables:
            assert 0 <= self._computed[seq_id] <= self.reserved_tokens(seq_id), f"{seq_id}: computed past its piece"


class ExactCache(ReservedCache):
    """Orca (Oracle): exactly the positions that the sequence will have. That is its prompt and ``max_tokens``: exact
    where lengths are forced, an upper bound where the model may end earlier.
    """

    def reserves(self, num_prompt_tokens: int, max_total_tokens: int) -> int:
        return max_total_tokens


class Pow2Cache(ReservedCache):
    """Orca (Pow2): the prompt, and the output's length rounded up to a power of two."""

    def reserves(self, num_prompt_tokens: int, max_total_tokens: int) -> int:
        return num_prompt_tokens + (1 << order_of(max_total_tokens - num_prompt_tokens))


def piece_reasons(capacity_tokens: int, block_size: int, max_model_len: int) -> list[str]:
    """Why a budget of so many tokens cannot hold the longest sequence in one piece."""
    blocks, longest = capacity_tokens // block_size, 1 << order_of(-(-max_model_len // block_size))
    if blocks and BuddyAllocator(blocks).largest >= longest:
        return []
    return [
        f"kv_cache.budget buys {capacity_tokens} tokens, no piece of {longest * block_size} that the longest sequence "
        f"needs (max_model_len={max_model_len}, a power of two of blocks of {block_size}): raise the budget"
    ]
