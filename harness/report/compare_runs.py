"""`python -m harness.report A B`: two runs against each other, arm by arm, where their records may be compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.records import StudyRecord, TrialRecord, read_run
from harness.report.charts.verdict import METRICS, verdict_text
from harness.report.data import middle
from harness.report.parts import MISSING, number, percent, times
from harness.statistics import Ratio, direction, ratio
from harness.summary import confidence_of, flatten, incomparable, is_adaptive, traffic_content

MOST_CHANGES = 8
COLUMNS = ("metric", "A", "B", "B / A", "n", "verdict")


@dataclass(frozen=True)
class MetricComparison:
    """Medians over each run's ok trials, and the ratio of the pairs: trial k of B over trial k of A."""

    metric: str
    first: float | None
    second: float | None
    ratio: Ratio


@dataclass(frozen=True)
class ArmComparison:
    """One arm of each run. ``reasons``: why there is no ratio; without any, ``metrics``. ``changes``: settings and
    versions that differ and may differ, `key: A -> B`: what the ratios are about.
    """

    first: str
    second: str
    reasons: list[str]
    changes: list[str]
    metrics: list[MetricComparison]


def compare_runs(first: StudyRecord, second: StudyRecord) -> list[ArmComparison]:
    """Arms of the same name, in A's order; where each run has a single arm, these two whatever their names.

    An empty list if the runs have no arm in common. Intervals have the level of the stricter run.
    """
    ours, theirs = list(first.plan["arms"]), list(second.plan["arms"])
    pairs = [(name, name) for name in ours if name in theirs]
    if not pairs and len(ours) == len(theirs) == 1:
        pairs = [(ours[0], theirs[0])]
    adaptive = is_adaptive(first.plan, second.plan)
    return [_compare(a, first.of_arm(a), b, second.of_arm(b), adaptive) for a, b in pairs]


def compare(first: Path, second: Path) -> int:
    """Print the comparison. Exit status 0, or 2 if nothing can be compared. RecordError if a record cannot be read."""
    runs = (read_run(first), read_run(second))
    found = compare_runs(*runs)
    if not found:
        names = [", ".join(map(str, run.plan["arms"])) or "none" for run in runs]
        print(f"error: no arm is in both runs: {first} has {names[0]}; {second} has {names[1]}", file=sys.stderr)
        return 2
    print(f"A: {first}\nB: {second}")
    print(
        "Pairs are trials of one number, so of one traffic, but run at different times: what the machine did\n"
        "meanwhile is in the ratios (within a study the arms are interleaved against that). "
        f"Intervals: {percent(confidence_of(*(run.plan for run in runs)), 0)}."
    )
    for arm in found:
        print()
        print("\n".join(lines_of(arm)))
    if all(arm.reasons for arm in found):
        reasons = list(dict.fromkeys(reason for arm in found for reason in arm.reasons))
        print(f"error: {first} and {second} cannot be compared: {'; '.join(reasons)}", file=sys.stderr)
        return 2
    return 0


def lines_of(arm: ArmComparison) -> list[str]:
    """The comparison of one arm as text."""
    title = arm.first if arm.first == arm.second else f"{arm.first} (A), {arm.second} (B)"
    if arm.reasons:
        return [f"{title}: not comparable", *(f"  {reason}" for reason in arm.reasons)]
    shown = arm.changes[:MOST_CHANGES]
    left = len(arm.changes) - len(shown)
    lines = [title, *(f"  {change}" for change in shown), *([f"  and {left} more settings differ"] if left else [])]
    if not arm.changes:
        lines.append("  same settings, versions and commit")
    known = {name: (unit, scale, digits) for name, unit, scale, digits in METRICS}
    table: list[tuple[str, ...]] = [COLUMNS]
    for row in arm.metrics:
        unit, scale, digits = known[row.metric]
        values = [number(value, digits, scale) for value in (row.first, row.second)]
        name = f"{row.metric} ({unit})" if unit else row.metric
        found, verdict = row.ratio, verdict_text(row.ratio.n, row.ratio.verdict)
        table.append((name, *values, times(found.median, found.low, found.high), str(found.n), verdict))
    widths = [max(len(texts[i]) for texts in table) for i in range(len(COLUMNS))]
    for texts in table:
        cells = [texts[0].ljust(widths[0]), *(texts[i].rjust(widths[i]) for i in range(1, 5)), texts[5]]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _compare(
    first: str, ours: Sequence[TrialRecord], second: str, theirs: Sequence[TrialRecord], adaptive: bool
) -> ArmComparison:
    a, b = ({int(t.run["trial"]): t.run for t in trials if t.run["status"] == "ok"} for trials in (ours, theirs))
    numbers = sorted(a.keys() & b.keys())
    if not numbers:
        return ArmComparison(first, second, ["no trial of one number is ok in both runs"], [], [])
    reasons = [_because(why, a[n], b[n]) for n in numbers for why in incomparable(a[n], b[n])]
    if reasons:
        return ArmComparison(first, second, list(dict.fromkeys(reasons)), [], [])
    mine, other = _values(a), _values(b)
    for name in _by_other_rules(a[numbers[0]]["config"], b[numbers[0]]["config"]):
        mine[name] = other[name] = {}
    metrics = [
        MetricComparison(
            name,
            middle(mine[name].values()),
            middle(other[name].values()),
            ratio(name, other[name], mine[name], adaptive=adaptive),
        )
        for name, *_ in METRICS
        if direction(name) and mine.get(name) and other.get(name)
    ]
    return ArmComparison(first, second, [], _changes(a[numbers[0]], b[numbers[0]]), metrics)


def _by_other_rules(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Metrics that judge the same requests by other limits or prices; the change itself is listed."""
    found = []
    if one.get("slo") != other.get("slo"):
        found += ["goodput_per_s", "slo_attainment", "cost_per_million_output_tokens"]
    if one.get("price") != other.get("price"):
        found.append("cost_per_million_output_tokens")
    return found


def _values(runs: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Metric -> trial number -> value, where there is one."""
    values: dict[str, dict[int, float]] = {}
    for number_of, run in runs.items():
        for name, value in flatten(run["metrics"]):
            if value is not None:
                values.setdefault(name, {})[number_of] = value
    return values


# --- what differs -----------------------------------------------------------------------------------------------------


def _because(reason: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """`incomparable`'s reason with the values that differ behind it."""
    sides = [_behind(reason.partition(" ")[0], run) for run in (a, b)]
    found = list(_differences(*sides))
    return f"{reason} ({', '.join(found[:3])})" if found else reason


def _behind(what: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that a reason is about."""
    config, provenance = run["config"], run["provenance"]
    parts = {
        "machine": {"machine": provenance.get("hardware")},
        "model": {"fingerprint": (provenance.get("model") or {}).get("fingerprint"), "model": config.get("model")},
        "traffic": {"workload": config.get("workload"), "seed": run["seed"], **traffic_content(run)},
        "clock": {"clock": run["clock"]},
    }
    return parts.get(what, {})


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What two comparable trials were run with: settings, versions and commit that are not the same."""

    def allowed(run: Mapping[str, Any]) -> dict[str, Any]:
        provenance = run["provenance"]
        settings = {key: value for key, value in run["config"].items() if key not in ("workload", "seed")}
        return {**settings, "versions": provenance.get("versions"), "git": provenance.get("git")}

    return list(_differences(allowed(a), allowed(b)))


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """`key: A -> B` for each leaf that is not the same on both sides."""
    ours, theirs = dict(_leaves(a)), dict(_leaves(b))
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) != theirs.get(key):
            yield f"{key}: {ours.get(key, MISSING)} -> {theirs.get(key, MISSING)}"


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else json.dumps(value, default=str)
