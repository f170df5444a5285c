"""The benchmark suite runs only where it is named: `python -m pytest tests/benchmarks [--benchmark-json=FILE]`.

With `--benchmark-disable` each is an ordinary test that runs once. The counts asserted beside the times (steps, tokens,
blocks, bytes) do not depend on the machine. Times are judged by their minimum: the run that nothing else disturbed.
"""

from __future__ import annotations

import sys
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


@pytest.fixture(scope="session")
def project_conf() -> Callable[[str, str], dict[str, Any]]:
    """(group, option) -> that file of conf/."""

    def read(group: str, option: str) -> dict[str, Any]:
        loaded: dict[str, Any] = yaml.safe_load((HERE.parents[1] / "conf" / group / f"{option}.yaml").read_text())
        return loaded

    return read
