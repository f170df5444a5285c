"""What the page needs to give ratios to another baseline: every trial's own values, and which trials may be paired."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from harness.records import TrialRecord
from harness.report.charts import decode_step, linear_layers, speedup
from harness.report.charts.verdict import METRICS, SIGNS
from harness.report.data import Arm, Report
from harness.statistics import T_QUANTILES, direction
from harness.summary import flatten, machines, no_pair, traffic_content

COMPARED = tuple(name for name, *_ in METRICS if direction(name))


def browser_data(report: Report) -> str:
    """JSON for `compare.js`, which applies the rules of `harness/statistics.py`; safe inside a script element.

    Values stand in full, so that its ratios are the summary's to the last digit that is shown; null is what no ratio
    counts (missing, infinite). A ratio for every pair of arms would be as exact, and grow with their number squared.
    """
    conditions = _Conditions()
    arms = [
        {
            "name": arm.name,
            "trials": [trial.run["trial"] for trial in arm.ok],
            "conditions": [conditions.index(trial) for trial in arm.ok],
            "values": _metrics(arm.ok) | _quantities(arm),
        }
        for arm in report.arms
    ]
    data = {
        "baseline": next((arm.index for arm in report.arms if arm.name == report.baseline), None),
        "confidence": report.confidence,
        "t": T_QUANTILES[report.confidence],
        "signs": SIGNS,
        "directions": {name: direction(name) for name in COMPARED},
        "comparable": conditions.comparable(),
        "arms": arms,
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _metrics(trials: list[TrialRecord]) -> dict[str, list[float | None]]:
    """Metric -> value by trial, of the metrics that any of them has."""
    found = [dict(flatten(trial.run["metrics"])) for trial in trials]
    columns = {name: [_finite(metrics.get(name)) for metrics in found] for name in COMPARED}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def _quantities(arm: Arm) -> dict[str, list[float | None]]:
    """The same of what charts compare beyond the metrics."""
    found: dict[str, Mapping[int, float]] = {speedup.DECODE_RATE: speedup.decode_rates(arm)}
    found |= {decode_step.quantity(part): values for part, values in decode_step.means_by_trial(arm).items()}
    for rows in linear_layers.row_counts([arm]):
        found[linear_layers.quantity(rows)] = linear_layers.stage_by_trial(arm, rows, "apply_s")
    numbers = [int(trial.run["trial"]) for trial in arm.ok]
    return {name: [_finite(values.get(number)) for number in numbers] for name, values in found.items() if values}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class _Conditions:
    """Trials by the conditions they ran under; two of the same number are paired only if these can be compared."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._runs: list[dict[str, Any]] = []
        self._by_trial: dict[int, set[int]] = defaultdict(set)

    def index(self, trial: TrialRecord) -> int:
        """A number for the conditions that it ran under, equal where they are."""
        run = trial.run
        config, provenance = run["config"], run["provenance"]
        parts = [config.get("model"), config.get("workload"), machines(run), provenance.get("model")]
        parts += [(provenance.get("versions") or {}).get("torch"), traffic_content(run)]
        key = json.dumps([*parts, run["seed"], run["clock"], run["emulated"]], sort_keys=True, default=str)
        if key not in self._found:
            self._found[key] = len(self._runs)
            self._runs.append(run)
        self._by_trial[run["trial"]].add(self._found[key])
        return self._found[key]

    def comparable(self) -> list[str]:
        """Row i, column j is "1" if trials under conditions i and j have a ratio."""
        rows = [["0"] * len(self._runs) for _ in self._runs]
        for together in self._by_trial.values():
            for i in together:
                for j in together:
                    rows[i][j] = "0" if no_pair(self._runs[i], self._runs[j]) else "1"
        return ["".join(row) for row in rows]
