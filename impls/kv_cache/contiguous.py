"""One block of max_model_len per sequence, as engines did before paging."""

from __future__ import annotations

from impls.kv_cache.blocks import BlockManager, arm_capacity_tokens, budget_reasons
from impls.seams import Arm


class ContiguousCache(BlockManager):
    """Every sequence reserves ``max_model_len`` positions when it is admitted, whatever it will use of them.

    The only difference from `PagedCache` is the size of a block, so the same kernels serve both.
    """

    def __init__(self, *, budget_bytes: int, bytes_per_token: int, max_model_len: int) -> None:
        super().__init__(
            budget_bytes=budget_bytes,
            bytes_per_token=bytes_per_token,
            max_model_len=max_model_len,
            block_size=max_model_len,
        )

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return budget_reasons(arm_capacity_tokens(arm), arm.max_model_len)
