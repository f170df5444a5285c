"""Which share of a trace's prompts a prefix cache of a given size finds: its hash_ids through the allocator alone.

    python -m scripts.prefix_replay conversation_trace.jsonl
    python -m scripts.prefix_replay conversation_trace.jsonl --blocks 1000 10000 --prefix radix

For traces in Mooncake's format: a hash id names 512 prompt tokens and everything before them. One request at a time,
in order of arrival, none kept in memory while another runs, so this is what recency and size allow; no model and no
clock. The last row, a cache without limit, is the ceiling of the traffic.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from impls.kv_cache.hash_chain import HashChain
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.radix import RadixTree
from impls.seams import PrefixIndex
from workloads.errors import WorkloadError
from workloads.lengths import MAX_TOKENS
from workloads.trace import HASH_BLOCK_TOKENS, TraceRow, read_trace

INDEXES: dict[str, type[HashChain] | type[RadixTree]] = {"hash_chain": HashChain, "radix": RadixTree}
BLOCKS = (1_000, 3_000, 10_000, 30_000, 50_000)


@dataclass(frozen=True)
class Replayed:
    """hit_rate: found / all prompt tokens. own_hit_rate: both without the first block, where all requests share it.
    reused: share of the requests that found more than that. rejected: requests larger than the cache.
    cpu_us: CPU time of the allocator, a request.
    """

    num_blocks: int
    hit_rate: float
    own_hit_rate: float
    reused: float
    rejected: int
    cpu_us: float


def prompts_of(rows: list[TraceRow]) -> list[list[int]]:
    """A prompt as one id for each full block, then one of its own: what is left over, or the last block, whose last
    token has to be computed in any case. Rows without hash_ids share nothing.
    """
    prompts = []
    for nth, row in enumerate(rows, 1):
        full = ((row.input_length or 1) - 1) // HASH_BLOCK_TOKENS
        own = -nth * MAX_TOKENS  # below it lie as many ids as a prompt can have blocks
        prompts.append([*(row.hash_ids or range(own - full, own))[:full], own])
    return prompts


def common_blocks(prompts: list[list[int]]) -> int:
    """1 if all prompts begin with the same full block (Mooncake's conversations do), else 0."""
    return int(len({prompt[0] for prompt in prompts if len(prompt) > 1}) == 1)


def replay(rows: list[TraceRow], index: PrefixIndex, num_blocks: int) -> Replayed:
    prompts = prompts_of(rows)
    common = common_blocks(prompts)
    kv = PagedCache(budget_bytes=num_blocks, bytes_per_token=1, max_model_len=num_blocks, block_size=1)
    kv.share_prefixes(index)
    found_blocks = own_blocks = reused = rejected = 0
    start = time.process_time()
    for prompt in prompts:
        if kv.never_fits(len(prompt)):
            rejected += 1
            continue
        found = kv.begin("request", prompt)
        if not kv.allocate("request", len(prompt)):
            raise AssertionError("an idle cache has no room for a request that fits it")
        kv.commit("request", len(prompt) - 1)
        kv.free("request")
        found_blocks += found
        own_blocks += max(0, found - common)
        reused += found > common
    seconds = time.process_time() - start
    tokens = sum(row.input_length or 0 for row in rows)
    own_tokens = sum(max(0, (row.input_length or 0) - common * HASH_BLOCK_TOKENS) for row in rows)
    return Replayed(
        num_blocks,
        found_blocks * HASH_BLOCK_TOKENS / tokens,
        own_blocks * HASH_BLOCK_TOKENS / max(1, own_tokens),
        reused / len(rows),
        rejected,
        seconds / len(rows) * 1e6,
    )


def unlimited(rows: list[TraceRow]) -> int:
    """Blocks of a cache that never has to evict."""
    return sum(map(len, prompts_of(rows)))


def markdown(results: list[tuple[str, Replayed]], ceiling: int) -> str:
    lines = [
        "| cache, tokens | prefix | hit rate | without a common first block | requests that reuse | us a request |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in results:
        size = "unlimited" if r.num_blocks == ceiling else f"{r.num_blocks * HASH_BLOCK_TOKENS:,}"
        size += f" ({r.rejected} requests do not fit)" if r.rejected else ""
        cells = [size, name, *(f"{100 * share:.1f} %" for share in (r.hit_rate, r.own_hit_rate, r.reused))]
        lines.append(f"| {' | '.join(cells)} | {r.cpu_us:.0f} |")
    return "\n".join(lines)


def main() -> None:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m scripts.prefix_replay", description=summary)
    parser.add_argument("trace", type=Path, help="JSONL with input_length and hash_ids, .gz or not")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="cache sizes, in blocks of 512 tokens")
    parser.add_argument("--prefix", nargs="+", choices=INDEXES, default=list(INDEXES))
    parser.add_argument("--limit", type=int, default=None, help="only so many requests")
    given = parser.parse_args()
    if min(given.blocks) < 1:
        raise SystemExit(f"--blocks {min(given.blocks)}: must be at least 1")
    try:
        rows = read_trace(given.trace, limit=given.limit, skip_head=0)
    except WorkloadError as error:
        raise SystemExit(str(error)) from error
    if not any(row.hash_ids for row in rows):
        raise SystemExit(f"{given.trace}: no request has hash_ids, so nothing says what its prompts share")
    ceiling = unlimited(rows)
    tokens = sum(row.input_length or 0 for row in rows)
    print(f"{given.trace.name}: {len(rows)} requests, {tokens:,} prompt tokens, blocks of {HASH_BLOCK_TOKENS}\n")
    sizes = [*sorted(b for b in set(given.blocks) if b < ceiling), ceiling]
    results = [(name, replay(rows, INDEXES[name](block_size=1), size)) for size in sizes for name in given.prefix]
    print(markdown(results, ceiling))


if __name__ == "__main__":
    main()
