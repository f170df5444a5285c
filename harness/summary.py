"""From a run's records to `summary.json`: medians over trials, ratios to the baseline and to `versus`; the table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from harness.prefix_ceiling import prefix_context
from harness.records import StudyRecord, TrialRecord, read_run, write_json
from harness.statistics import ADAPTIVE_CONFIDENCE, CONFIDENCE, direction, ratio
from harness.texts import number, percent, times

# Metric -> trial number -> value.
Values = dict[str, dict[int, float | None]]
# An arm shows the first of these that any of its trials has.
STATUS_ORDER = ("failed", "aborted", "ok", "not_run")
RATE = "output_tokens_per_s"  # whose ratios the table has
TABLE_COLUMNS = (
    *("arm", "output tok/s", "vs baseline", "vs previous", "n", "TTFT p50/p99 s", "ITL p50/p99 ms", "slots"),
    *("KV waste", "acceptance", "peak memory"),
)
PREFIX_COLUMNS = ("prefix hits / ceiling / planned", "KV cache")  # where some arm found a prefix


def summarize(run_dir: Path, study: StudyRecord | None = None) -> dict[str, Any]:
    """Write `summary.json` beside the records of a run and return it. The same records give the same bytes.

    study: the records, where they have been read already.
    """
    summary = summary_of(study or read_run(run_dir))
    write_json(run_dir / "summary.json", summary)
    return summary


def summary_of(study: StudyRecord) -> dict[str, Any]:
    """{baseline, arms: {<arm>: {status, reasons, warnings, metrics, ratios, versus, step_ratios}}}, arms in the plan's
    order. warnings: what to know of an arm's pairs -> the trials that it is true of.
    """
    arms: Mapping[str, Any] = study.plan["arms"]
    baseline = study.plan.get("baseline") or next(iter(arms), None)
    adaptive = is_adaptive(study.plan)
    trials = {arm: study.of_arm(arm) for arm in arms}
    values = {arm: _values(found) for arm, found in trials.items()}

    def ratios(arm: str, reference: str) -> dict[str, dict[str, Any]]:
        pairable = comparable(trials[arm], trials.get(reference, []))
        return _ratios(values[arm], values.get(reference, {}), pairable, adaptive)

    summary: dict[str, Any] = {}
    for arm, plan in arms.items():
        versus = (plan or {}).get("versus")
        summary[arm] = {
            "status": _status(trials[arm]),
            "reasons": _reasons(trials[arm]),
            "warnings": {
                text: numbers
                for reference in (baseline, versus)
                for text, numbers in _other_code(trials[arm], trials.get(reference or "", [])).items()
            },
            "metrics": _medians(values[arm]),
            "ratios": ratios(arm, baseline or ""),
            "versus": versus,
            "step_ratios": None if versus is None else ratios(arm, versus),
        }
    return {"baseline": baseline, "arms": summary}


def is_adaptive(*plans: Mapping[str, Any]) -> bool:
    """Whether any of these studies stops by its own intervals, so that all intervals have the stricter level."""
    return any(plan.get("half_width") for plan in plans)


def confidence_of(*plans: Mapping[str, Any]) -> float:
    """The level of the intervals that are reported of these studies."""
    return ADAPTIVE_CONFIDENCE if is_adaptive(*plans) else CONFIDENCE


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """(`ttft_s.p50`, value) for every number and null of a record; what is neither (a text) is left out."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        elif value is None:
            yield prefix + name, None
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


def incomparable(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Why two trials' run.json give no ratio: another machine, model, traffic or clock, or an emulated speed.

    Two models are the same if their fingerprints are, wherever they were read from; a record without one is compared
    by its option, in which the length limit is the arm's and not the model's. So it is with `traffic_content`.
    """
    here, there = _conditions(ours), _conditions(theirs)
    if None in (here["fingerprint"], there["fingerprint"]):
        del here["fingerprint"], there["fingerprint"]
    else:
        here["model"], there["model"] = here.pop("fingerprint"), there.pop("fingerprint")
    told = here["content"].keys() & there["content"].keys()
    for side in (here, there):
        content = side.pop("content")
        side["traffic"] = (side["traffic"], {name: content[name] for name in told})
    reasons = [f"{name} differs" for name, value in here.items() if value != there[name]]
    return reasons + [f"emulated: {run['emulated']}" for run in (ours, theirs) if run["emulated"]]


def machines(run: Mapping[str, Any]) -> list[Any]:
    """The hardware of a trial: its own host's, then that of each worker on another, whatever their names."""
    provenance = run["provenance"]
    others = [worker.get("hardware") for worker in (provenance.get("workers") or {}).values()]
    return [provenance.get("hardware"), *sorted(others, key=lambda hardware: json.dumps(hardware, sort_keys=True))]


def traffic_content(run: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the requests beside config and seed, as far as the record tells it: the trace's bytes, the text that
    prompts are made of (it comes with Python) and the length to which an arm has clipped them.
    """
    workload = run["provenance"].get("workload") or {}
    told = {**(workload.get("text") or {}), **workload}
    return {name: told[name] for name in ("file_sha256", "corpus_sha256", "clipped_to") if name in told}


def no_pair(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Why two arms' trials of one number give no ratio in their study: as `incomparable`, or another torch, of which
    only two whole runs are compared. A study that is resumed after an upgrade has both halves of such a pair.
    """
    torch = [(run["provenance"].get("versions") or {}).get("torch") for run in (ours, theirs)]
    return incomparable(ours, theirs) + ([] if torch[0] == torch[1] else [f"torch differs: {torch[0]}, {torch[1]}"])


def comparable(ours: Iterable[TrialRecord], theirs: Iterable[TrialRecord]) -> bool:
    """Whether two arms have ratios at all: every pair of ok trials of one number ran under the same conditions."""
    return not any(no_pair(a, b) for a, b in _pairs(ours, theirs))


def _pairs(
    ours: Iterable[TrialRecord], theirs: Iterable[TrialRecord]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """run.json of the ok trials of one number."""
    other = {trial.run["trial"]: trial.run for trial in theirs if trial.run["status"] == "ok"}
    return [(t.run, other[t.run["trial"]]) for t in ours if t.run["status"] == "ok" and t.run["trial"] in other]


def _other_code(ours: Iterable[TrialRecord], theirs: Iterable[TrialRecord]) -> dict[str, list[int]]:
    """Of a study that was resumed after a commit or an edit: which pairs were measured half before, half after it.

    A warning and no more, for most commits change no figure, and which do, nobody can tell from here.
    """
    found: dict[str, list[int]] = {}
    for run, other in _pairs(ours, theirs):
        here, there = _code(run), _code(other)
        if here != there:
            text = f"measured with different code: {here} here, {there} in {other['arm']}"
            found.setdefault(text, []).append(run["trial"])
    return found


def _code(run: Mapping[str, Any]) -> str:
    git = run["provenance"].get("git") or {}
    commit = str(git["commit"])[:10] if git.get("commit") else "no commit"
    return f"{commit} with uncommitted changes" if git.get("dirty") else commit


def _in_use(options: Any) -> Any:
    """Without those that are off (null, an empty list): a record from before an option was there has not got it."""
    if not isinstance(options, Mapping):
        return options
    return {name: _in_use(value) for name, value in options.items() if value is not None and value != []}


def _conditions(run: Mapping[str, Any]) -> dict[str, Any]:
    model = run["config"].get("model")
    if isinstance(model, Mapping):
        model = {key: value for key, value in model.items() if key != "max_model_len"}
    return {
        "machine": machines(run),
        "model": model,
        "fingerprint": (run["provenance"].get("model") or {}).get("fingerprint"),
        "traffic": (_in_use(run["config"].get("workload")), run["seed"]),
        "content": traffic_content(run),
        "clock": run["clock"],
    }


def _status(trials: Iterable[TrialRecord]) -> str:
    found = {trial.run["status"] for trial in trials}
    return next((status for status in STATUS_ORDER if status in found), "not_run")


def _reasons(trials: list[TrialRecord]) -> list[str]:
    if not trials:
        return ["no trial recorded"]
    return list(dict.fromkeys(reason for trial in trials for reason in trial.run["reasons"]))


def _values(trials: Iterable[TrialRecord]) -> Values:
    """Of the trials that are ok."""
    values: Values = {}
    for trial in trials:
        if trial.run["status"] == "ok":
            for name, value in flatten(trial.run["metrics"] | prefix_context(trial)):
                values.setdefault(name, {})[trial.run["trial"]] = value
    return values


def _medians(values: Values) -> dict[str, float | None]:
    medians: dict[str, float | None] = {}
    for name, by_trial in sorted(values.items()):
        known = [value for value in by_trial.values() if value is not None]
        medians[name] = median(known) if known else None
    return medians


def _ratios(arm: Values, reference: Values, pairable: bool, adaptive: bool) -> dict[str, dict[str, Any]]:
    """Of every metric of ``arm`` that has a good direction, values or nulls; without a value on both sides n is 0."""
    return {
        name: dict(vars(ratio(name, arm[name], reference.get(name, {}), comparable=pairable, adaptive=adaptive)))
        for name in sorted(arm)
        if direction(name) != 0
    }


# --- the table --------------------------------------------------------------------------------------------------------


def table_columns(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Of the ladder's table. A hit rate comes with the cache that had it and with what the traffic allows."""
    found = any(entry["metrics"].get("prefix_hit_rate_observed") for entry in summary["arms"].values())
    return TABLE_COLUMNS + (PREFIX_COLUMNS if found else ())


def table_rows(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """The ladder's table, one row an arm, by `table_columns`: what the run prints and what the README shows."""
    rows, columns = [], table_columns(summary)
    for arm, entry in summary["arms"].items():
        metrics = entry["metrics"]
        waste = [metrics.get(f"kv_waste.{part}") for part in ("internal", "reserved_ahead", "unusable")]
        if not metrics:
            shown = [f"{entry['status']}: {'; '.join(entry['reasons'])}", *[""] * (len(columns) - 2)]
        else:
            shown = [
                number(metrics.get(RATE), 1),
                "baseline" if arm == summary["baseline"] else _ratio_text(entry["ratios"]),
                "" if entry["step_ratios"] is None else f"{_ratio_text(entry['step_ratios'])} vs {entry['versus']}",
                _pairs_text(entry["ratios"], entry["step_ratios"] or entry["ratios"]),
                _pair(metrics, "ttft_s", 1, 2),
                _pair(metrics, "itl_s", 1000, 1),
                percent(metrics.get("slot_utilization")),
                percent(None if None in waste else math.fsum(waste)),
                percent(metrics.get("acceptance_rate")),
                _megabytes(metrics.get("peak_memory_bytes")),
            ]
            if columns != TABLE_COLUMNS:
                shown += [_prefix_hits(metrics), _tokens(metrics.get("kv_capacity_tokens"))]
        rows.append(dict(zip(columns, [arm, *shown], strict=True)))
    return rows


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.0f} MB"


def _tokens(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} tokens"


def _prefix_hits(metrics: Mapping[str, float | None]) -> str:
    return " / ".join(percent(metrics.get(f"prefix_hit_rate_{of}")) for of in ("observed", "ceiling", "planned"))


def _pair(metrics: Mapping[str, float | None], name: str, scale: int, digits: int) -> str:
    values = [metrics.get(f"{name}.{part}") for part in ("p50", "p99")]
    return " / ".join(number(None if value is None else value * scale, digits) for value in values)


def _ratio_text(ratios: Mapping[str, Mapping[str, Any]]) -> str:
    """`1.84x [1.71, 1.98]`; without a median why there is none, and `-` where that is for want of a pair."""
    entry = ratios.get(RATE)
    if entry is None:
        return "-"
    why_none = "not comparable" if entry["verdict"] == "not comparable" else "-"
    return times(entry["median"], entry["low"], entry["high"], why_none)


def _pairs_text(*ratios: Mapping[str, Mapping[str, Any]]) -> str:
    """Trials behind each ratio (of the baseline: that it has), once where they are as many."""
    return " / ".join(dict.fromkeys(str(found.get(RATE, {"n": 0})["n"]) for found in ratios))
