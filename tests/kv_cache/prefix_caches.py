"""Caches whose sequences share blocks, for these tests."""

from __future__ import annotations

from typing import Any

from impls.kv_cache.hash_chain import HashChain
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.radix import RadixTree

INDEXES = [HashChain, RadixTree]
SIZE = 2  # positions in a block
BLOCKS = 9
LONGEST = 12


def cache(index: type[Any], blocks: int = BLOCKS, size: int = SIZE, longest: int = LONGEST) -> PagedCache:
    kv = PagedCache(budget_bytes=blocks * size, bytes_per_token=1, max_model_len=longest, block_size=size)
    kv.share_prefixes(index(block_size=size))
    return kv
