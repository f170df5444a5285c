"""`python -m harness.report` of 1,000 runs within 10 s of CPU time: 40 arms, 25 trials each."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import slowness
from simulated_run import write_many

from harness.report.__main__ import main

TARGET_S = 10.0  # of CPU time: what else the machine does is no fault of the report
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
    allowed_s = TARGET_S * slowness()
    while cpu_s[-1] >= allowed_s and len(cpu_s) < ATTEMPTS:
        cpu_s.append(report())
    benchmark.extra_info.update(runs=arms * trials, bytes=page.stat().st_size, cpu_s=cpu_s, grown_bytes=grown)
    assert min(cpu_s) < allowed_s, f"{arms * trials} runs took {cpu_s} s of CPU time"


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
