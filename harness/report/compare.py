"""What the page needs to give ratios to another baseline: every trial's own values, and which trials may be paired."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

from harness.records import TrialRecord
from harness.report.charts.verdict import METRICS, SIGNS
from harness.report.data import Report
from harness.statistics import ADAPTIVE_CONFIDENCE, CONFIDENCE, T_QUANTILES, direction
from harness.summary import flatten, incomparable

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
            "values": _values(arm.ok),
        }
        for arm in report.arms
    ]
    confidence = ADAPTIVE_CONFIDENCE if report.plan.get("half_width") else CONFIDENCE
    data = {
        "baseline": next((arm.index for arm in report.arms if arm.name == report.baseline), None),
        "confidence": confidence,
        "t": T_QUANTILES[confidence],
        "signs": SIGNS,
        "directions": {name: direction(name) for name in COMPARED},
        "comparable": conditions.comparable(),
        "arms": arms,
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _values(trials: list[TrialRecord]) -> dict[str, list[float | None]]:
    """Metric -> value by trial, of the metrics that any of them has."""
    found = [dict(flatten(trial.run["metrics"])) for trial in trials]
    columns = {name: [_finite(metrics.get(name)) for metrics in found] for name in COMPARED}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class _Conditions:
    """Trials by the conditions they ran under; two of the same number are paired only if these can be compared."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._runs: list[dict[str, Any]] = []
        self._by_trial: dict[int, set[int]] = defaultdict(set)

    def index(self, trial: TrialRecord) -> int:
        run = trial.run
        config, provenance = run["config"], run["provenance"]
        parts = [config.get("model"), config.get("workload"), provenance.get("hardware"), provenance.get("model")]
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
                    rows[i][j] = "0" if incomparable(self._runs[i], self._runs[j]) else "1"
        return ["".join(row) for row in rows]
