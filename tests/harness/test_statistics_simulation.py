"""docs/statistics.md says what the simulation of this code finds, and the simulation is of this code."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from harness.adaptive import needs_more
from harness.statistics import ADAPTIVE_CONFIDENCE, CONFIDENCE, interval, ratio

SCRIPT = Path(__file__).parents[2] / "scripts" / "statistics_table.py"
# Every other law is covered in at least 94 %.
SHORT = {("busy host, one arm alone hit", "n = 5")}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("statistics_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


simulated = load()


def test_the_page_is_what_the_code_gives_and_falls_short_only_where_it_says_so() -> None:
    text = simulated.PAGE.read_text(encoding="utf-8")
    assert text == simulated.page(text), "run: python -m scripts.statistics_table"
    coverage = text[text.index("### Coverage") : text.index("### Power")].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in coverage if line.startswith("|")]
    names, rows = table[0], table[2:]
    assert [row[0] for row in rows] == [law.name for law in simulated.LAWS]
    low = {(row[0], name) for row in rows for name, cell in zip(names, row, strict=True) if cell.startswith("**")}
    assert low == SHORT


@pytest.mark.parametrize("confidence", [CONFIDENCE, ADAPTIVE_CONFIDENCE])
@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 9, 12, 20])
def test_simulated_intervals_are_those_of_the_harness(n: int, confidence: float) -> None:
    logs = np.random.default_rng([n, 1]).standard_normal((50, n))
    expected = [interval(row, confidence) for row in logs.tolist()]
    assert np.stack(simulated.intervals(logs, confidence), axis=1) == pytest.approx(np.array(expected))


def test_simulated_adaptive_studies_stop_where_the_harness_does_and_report_what_it_does() -> None:
    noise, studies = 0.02, 60
    simulation = simulated.Simulation(simulated.LAWS[0])
    bounds, trials = simulation.adaptive(noise)
    reference = dict.fromkeys(range(simulated.MAX_TRIALS), 1.0)
    assert len(set(trials[:studies].tolist())) > 3
    for study in range(studies):
        arm: dict[int, float | None] = {}
        while needs_more(
            {"arm": arm, "reference": dict(reference)},
            "reference",
            {},
            simulated.HALF_WIDTH,
            blocks=len(arm),
            max_trials=simulated.MAX_TRIALS,
        ):
            arm[len(arm)] = math.exp(noise * simulation.logs[study, len(arm)])
        assert len(arm) == trials[study]
        found = ratio("output_tokens_per_s", arm, dict(reference), adaptive=True)
        assert found.low is not None and math.log(found.low) == pytest.approx(noise * bounds.low[study], abs=1e-9)
        assert found.high is not None and math.log(found.high) == pytest.approx(noise * bounds.high[study], abs=1e-9)


def test_each_law_has_the_spread_that_it_claims() -> None:
    """In units of the noise: the median absolute log ratio of a block, against the law worked out by hand."""
    spread = {law.name: float(np.median(np.abs(simulated.Simulation(law).logs))) for law in simulated.LAWS}
    normal = 0.6745
    assert spread["normal noise"] == pytest.approx(normal * math.sqrt(2), rel=0.02)
    assert spread["machine's speed wanders"] == pytest.approx(normal * math.sqrt(3), rel=0.02)
    assert spread["noise that lasts"] == pytest.approx(normal, rel=0.02)  # variance 2 (1 - 0.5)
    assert spread["machine slows steadily, 3 x noise a trial"] == pytest.approx(3.0, rel=0.05)
    assert spread["heavy tails"] < spread["normal noise"] < spread["busy host"]
