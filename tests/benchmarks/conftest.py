"""The benchmark suite runs only where it is named: `python -m pytest tests/benchmarks [--benchmark-json=FILE]`.

With `--benchmark-disable` each is an ordinary test that runs once. The counts asserted beside the times (steps, tokens,
blocks, bytes) do not depend on the machine. Times are judged by their minimum, the run that nothing else disturbed, and
against something timed beside them where a slower machine could miss a target in seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
# Helpers of the rooms whose parts are timed here.
sys.path += [str(HERE.parent / room) for room in ("attention", "engine", "execution", "report")]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(HERE) for path in asked) else True


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Which processor, not whose."""
    machine_info.pop("node", None)


def best_seconds(benchmark: Any) -> float | None:
    """The fastest round of what `benchmark` just timed; None with --benchmark-disable."""
    return None if benchmark.stats is None else float(benchmark.stats.stats.min)


QUIET_LOOP_S = 160e-9  # of CPU time for an object of the yardstick, on a quiet core of an AMD EPYC (Zen 3)


def slowness() -> float:
    """How many times slower Python runs now than on the machine that the targets were set on, from 1 to 4.

    A slower processor, or neighbours in the core's cache and units, stretch CPU time too: a fixed loop over as many
    objects as a large scheduler step has shows by how much.
    """
    objects = {f"request-{i}": ([i] * 4, i) for i in range(4096)}
    found: dict[str, int] = {}
    best = float("inf")
    for _ in range(10):
        start = time.thread_time()
        for key in objects:
            items, number = objects[key]
            found[key] = len(items) - number
        best = min(best, time.thread_time() - start)
    return min(4.0, max(1.0, best / len(objects) / QUIET_LOOP_S))  # slower than that, nothing can be judged


@pytest.fixture(scope="session")
def project_conf() -> Callable[[str, str], dict[str, Any]]:
    """(group, option) -> that file of conf/."""

    def read(group: str, option: str) -> dict[str, Any]:
        loaded: dict[str, Any] = yaml.safe_load((HERE.parents[1] / "conf" / group / f"{option}.yaml").read_text())
        return loaded

    return read
