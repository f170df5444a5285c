"""Every trial by itself: its figures, its agreement with the reference, its settings and its machine."""

from __future__ import annotations

import json
from collections.abc import Mapping

from harness.report.data import Report
from harness.report.parts import Cell, Table, number_cell, percent_cell, text_cell


def trials_table(report: Report) -> Table:
    rows = []
    for arm in report.arms:
        for trial in arm.trials:
            run, metrics = trial.run, trial.run["metrics"]
            before, after = (run["provenance"].get(key) or {} for key in ("host_before", "host_after"))
            rows.append(
                [
                    text_cell(arm.name),
                    number_cell(run["trial"], 0),
                    Cell(run["status"], numeric=False, style="" if run["status"] == "ok" else "worse"),
                    number_cell(metrics.get("output_tokens_per_s"), 1),
                    number_cell((metrics.get("ttft_s") or {}).get("p50"), 3),
                    number_cell((metrics.get("itl_s") or {}).get("p50"), 1, 1e3),
                    number_cell(metrics.get("n_finished"), 0),
                    number_cell(metrics.get("n_failed"), 0),
                    number_cell(metrics.get("n_rejected"), 0),
                    number_cell(before.get("load_1m"), 1),
                    number_cell(after.get("load_1m"), 1),
                    text_cell(run["seed"]),
                    text_cell(run["provenance"].get("started")),
                ]
            )
    columns = ("arm", "trial", "status", "output tok/s", "TTFT p50 (s)", "ITL p50 (ms)", "finished", "failed")
    return Table((*columns, "rejected", "load before", "load after", "seed", "started"), rows)


def equivalence_table(report: Report) -> Table:
    """Do the arms' tokens agree with the reference's, of the trials in which that was checked?"""
    rows = []
    for arm in report.arms:
        for trial in arm.trials:
            found = trial.run.get("equivalence")
            if not isinstance(found, Mapping):
                continue
            gaps = [d.get("gap") for d in found.get("divergences") or [] if d.get("gap") is not None]
            common, tokens = found.get("common_tokens"), found.get("tokens")
            rows.append(
                [
                    text_cell(arm.name),
                    number_cell(trial.run["trial"], 0),
                    text_cell(found.get("reference")),
                    number_cell(found.get("requests"), 0),
                    number_cell(found.get("identical"), 0),
                    percent_cell(common / tokens if tokens else None),
                    number_cell(len(found.get("divergences") or []), 0),
                    number_cell(max(gaps, default=None), 4),
                ]
            )
    columns = ("arm", "trial", "reference", "requests (n)", "identical", "tokens before the first difference")
    return Table((*columns, "differences looked at", "largest logit gap there"), rows)


def settings_table(report: Report) -> Table:
    """Every setting whose value is not the same in all arms, and the others once."""
    flat = {arm.name: dict(_flatten(arm.config)) for arm in report.arms}
    keys = list(dict.fromkeys(key for settings in flat.values() for key in settings))
    differing = [key for key in keys if len({settings.get(key) for settings in flat.values()}) > 1]
    rows = [
        [text_cell(key), *(text_cell(flat[arm.name].get(key)) for arm in report.arms)]
        for key in [*differing, *(key for key in keys if key not in differing)]
    ]
    return Table(("setting", *(arm.name for arm in report.arms)), rows)


def machine_table(report: Report) -> Table:
    """Hardware and versions; a value that differs between trials is given with the trials that have it."""
    values: dict[str, dict[str, list[str]]] = {}
    for arm in report.arms:
        for trial in arm.trials:
            provenance = trial.run["provenance"]
            parts = {name: provenance.get(name) or {} for name in ("hardware", "versions", "kernels", "git")}
            parts["limits"] = trial.run["limits"] or {}
            for key, value in _flatten(parts):
                values.setdefault(key, {}).setdefault(value, []).append(f"{arm.name}/{trial.run['trial']}")
    rows = []
    for key, by_value in values.items():
        if len(by_value) == 1:
            rows.append([text_cell(key), text_cell(next(iter(by_value)))])
        else:
            shown = "; ".join(f"{value} ({', '.join(trials)})" for value, trials in by_value.items())
            rows.append([text_cell(key), text_cell(shown)])
    return Table(("property", "value"), rows)


def _flatten(value: object, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        start = f"{prefix}." if prefix else ""
        return [pair for key, item in value.items() for pair in _flatten(item, f"{start}{key}")]
    return [(prefix, value if isinstance(value, str) else json.dumps(value, default=str))]
