"""The two commands that run allocators without a model, on lengths and traces whose answer is known by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from impls.kv_cache.contiguous import ContiguousCache
from impls.kv_cache.hash_chain import HashChain
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.radix import RadixTree
from scripts import kv_waste, prefix_replay
from workloads.trace import read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"


class TestKVWaste:
    def test_by_hand(self) -> None:
        """Two requests of 2 + 2 tokens and one that waits, two slots of 8: two steps count, of 2 and 3 positions."""
        kv = ContiguousCache(budget_bytes=20, bytes_per_token=1, max_model_len=8)
        shares = kv_waste.measure(kv, [(2, 2)] * 3, lambda prompt, output: None, 8)
        assert shares.used == pytest.approx((2 * 2 + 2 * 3) / 40)
        assert shares.reserved == pytest.approx((2 * 1 + 0) / 40)
        assert shares.internal == pytest.approx((2 * 5 + 2 * 5) / 40)
        assert shares.other == pytest.approx(8 / 40)
        assert (shares.sequences, shares.preemptions) == (2, 0)

    def test_paged_by_hand(self) -> None:
        kv = PagedCache(budget_bytes=8, bytes_per_token=1, max_model_len=8, block_size=4)
        shares = kv_waste.measure(kv, [(4, 1)] * 3, lambda prompt, output: None, 8)
        assert (shares.used, shares.reserved, shares.internal, shares.other) == (1, 0, 0, 0)

    def test_figure_2_of_the_vllm_paper(self) -> None:
        """Their order, and about their size, not their digits: the lengths are surrogates (one lognormal each)."""
        rows = dict(kv_waste.table(kv_waste.draw("sharegpt", "sharegpt", 100, 2048, 0), 15_700, 2048))
        for shares in rows.values():
            parts = (shares.used, shares.reserved, shares.internal, shares.other)
            assert sum(parts) == pytest.approx(1) and min(parts) >= 0
        for name, used in kv_waste.PAPER.items():
            assert rows[name].used == pytest.approx(used / 100, abs=0.08), name
        order = [rows[name].used for name in kv_waste.PAPER]
        assert order == sorted(order)
        paged = [rows[name] for name in rows if name.startswith("paged")]
        internal = [shares.internal for shares in paged]
        assert internal == sorted(internal) and internal[0] == 0, "larger blocks, more of them left empty"
        assert rows["exact (Orca Oracle)"].internal < 0.01 < rows["pow2 (Orca Pow2)"].internal


def trace(path: Path, *rows: tuple[int, list[int]]) -> Path:
    lines = [
        json.dumps({"timestamp": i, "input_length": n, "output_length": 1, "hash_ids": ids})
        for i, (n, ids) in enumerate(rows)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("index", [HashChain, RadixTree])
class TestPrefixReplay:
    def test_by_hand(self, tmp_path: Path, index: type) -> None:
        """Blocks are found in a chain from the start, the last token never; a short cache forgets the oldest."""
        rows = (
            (1100, [1, 2, 3]),
            (1536, [1, 2, 3]),  # finds 1 and 2: its own 3 has the last token
            (1025, [1, 9, 3]),  # finds 1
            (600, [7, 8]),
            (1025, [1, 2, 3]),  # finds 1 and 2, unless they have gone
        )
        read = read_trace(trace(tmp_path / "t.jsonl", *rows), limit=None, skip_head=0)
        total = sum(n for n, _ in rows)
        ample = prefix_replay.replay(read, index(block_size=1), 100)
        assert ample.hit_rate == 512 * (2 + 1 + 2) / total and ample.reused == 3 / 5
        small = prefix_replay.replay(read, index(block_size=1), 3)
        # Three units: each request takes two known or new blocks and one for its own end.
        assert small.hit_rate == 512 * (2 + 1 + 1) / total and small.rejected == 0
        assert prefix_replay.replay(read, index(block_size=1), 2).rejected == 4

    def test_the_start_that_all_share_is_told_apart(self, tmp_path: Path, index: type) -> None:
        rows = ((1100, [0, 2, 3]), (600, [0, 5]), (1200, [0, 2, 3]))
        read = read_trace(trace(tmp_path / "t.jsonl", *rows), limit=None, skip_head=0)
        found = prefix_replay.replay(read, index(block_size=1), 100)
        assert found.hit_rate == 512 * 3 / 2900
        assert found.own_hit_rate == 512 / (2900 - 3 * 512) and found.reused == 1 / 3

    def test_rows_without_ids_share_nothing(self, tmp_path: Path, index: type) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text("\n".join(json.dumps({"input_length": 2000, "output_length": 1}) for _ in range(3)))
        assert prefix_replay.replay(read_trace(path, limit=None, skip_head=0), index(block_size=1), 99).hit_rate == 0


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not beside this checkout")
@pytest.mark.parametrize("index", [HashChain, RadixTree])
def test_a_recorded_trace(index: type) -> None:
    """An independent count over the synthetic trace (LRU over its blocks): .651 without limit, .432 at 10,000 blocks,
    .086 at 1,000. It counted the blocks of a prompt that are not full as well.
    """
    rows = read_trace(TRACES / "mooncake_synthetic_trace.jsonl", limit=None, skip_head=0)
    for blocks, expected in ((prefix_replay.unlimited(rows), 0.651), (10_000, 0.432), (1_000, 0.086)):
        assert prefix_replay.replay(rows, index(block_size=1), blocks).hit_rate == pytest.approx(expected, abs=0.02)
