"""`python -m harness.report` of 1,000 runs within 10 s of CPU time: 40 arms, 25 trials each.

A slower processor may exceed that, up to `BARE_READINGS` times the CPU time of merely reading the same files.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from simulated_run import write_many

from harness.report.__main__ import main

TARGET_S = 10.0  # of CPU time: what else the machine does is no fault of the report
BARE_READINGS = 3.3  # which it may cost; 1.6 to 2.0 when this was written, on a processor half again as slow
ATTEMPTS = 3  # CPU time grows too where neighbours share the core's cache and units: the best of a few counts
SIZES = {(10, 10): "100 runs", (40, 25): "1000 runs"}


@pytest.mark.parametrize(("arms", "trials"), list(SIZES), ids=list(SIZES.values()))
def test_report(benchmark: Any, tmp_path: Path, arms: int, trials: int) -> None:
    write_many(tmp_path, arms, trials, num_requests=12)

    def report() -> float:
        start = time.process_time()
        assert main([str(tmp_path)]) == 0
        return time.process_time() - start

    before = peak_bytes()
    cpu_s = [benchmark.pedantic(report, rounds=1)]
    grown = peak_bytes() - before
    page, summary = tmp_path / "report.html", json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["arms"]) == [f"arm{i}" for i in range(arms)]
    assert {arm["ratios"]["output_tokens_per_s"]["n"] for arm in list(summary["arms"].values())[1:]} == {trials}
    text = page.read_text("utf-8")
    assert all(f"arm{i}" in text for i in range(arms))
    bare_s = [bare_reading_s(tmp_path)]
    while cpu_s[-1] >= TARGET_S and len(cpu_s) < ATTEMPTS:
        cpu_s.append(report())
        bare_s.append(bare_reading_s(tmp_path))
    benchmark.extra_info.update(runs=arms * trials, bytes=page.stat().st_size, grown_bytes=grown)
    benchmark.extra_info.update(cpu_s=cpu_s, bare_s=bare_s, met=min(cpu_s) < TARGET_S)
    allowed_s = max(TARGET_S, BARE_READINGS * min(bare_s))
    assert min(cpu_s) < allowed_s, f"{arms * trials} runs took {cpu_s} s of CPU time, reading them {bare_s}"


def bare_reading_s(folder: Path) -> float:
    """CPU time of reading every record there once, and doing nothing with it."""
    start = time.process_time()
    for path in folder.glob("*/*/run.json"):
        json.loads(path.read_text("utf-8"))
        for table in path.parent.glob("*.parquet"):
            with pq.ParquetFile(table) as file:
                file.read_row_groups(range(file.num_row_groups), use_threads=False)
    return time.process_time() - start


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
