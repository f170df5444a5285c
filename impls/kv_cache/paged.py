"""Small blocks, taken as a sequence grows (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

from impls.kv_cache.blocks import BlockManager, arm_capacity_tokens, budget_reasons
from impls.seams import Arm


class PagedCache(BlockManager):
    """A sequence holds the blocks that its tokens fill, so at most ``block_size - 1`` positions of it lie idle."""

    def __init__(self, *, budget_bytes: int, bytes_per_token: int, max_model_len: int, block_size: int = 16) -> None:
        super().__init__(
            budget_bytes=budget_bytes,
            bytes_per_token=bytes_per_token,
            max_model_len=max_model_len,
            block_size=block_size,
        )

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        block_size = arm.axes["kv_cache"].get("block_size", 16)
        if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
            return [f"kv_cache.block_size={block_size}: must be an integer of at least 1"]
        return budget_reasons(arm_capacity_tokens(arm), block_size)
