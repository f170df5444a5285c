"""Under which conditions the figures came about, what speaks against them, and every trial by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.records import TrialRecord
from harness.report.data import Arm, Report
from harness.report.parts import Cell, Table, byte_size, number_cell, percent, percent_cell, text_cell


@dataclass(frozen=True)
class Notice:
    """One thing to know before believing the figures; ``level``: error, not_run, warning or note."""

    level: str
    what: str
    arms: list[str]
    details: list[str]


def notices(report: Report) -> list[Notice]:
    """Failures first, then arms that did not run, emulated speeds, and the validity warnings by kind."""
    found: list[Notice] = []
    for status, level in (("failed", "error"), ("aborted", "error"), ("not_run", "not_run")):
        arms = [arm for arm in report.arms if _has(arm, status)]
        details = [f"{arm.name}: {reason}" for arm in arms for reason in _reasons(arm, status)]
        if arms:
            found.append(Notice(level, status.replace("_", " "), [arm.name for arm in arms], details))
    emulated = [arm for arm in report.arms if arm.emulated]
    if emulated:
        details = [f"{arm.name}: {note}" for arm in emulated for note in arm.emulated]
        found.append(Notice("note", "emulated: this speed is not compared", [arm.name for arm in emulated], details))
    return found + _warnings(report)


def conditions(report: Report) -> list[tuple[str, str]]:
    """(name, value) of what every figure was measured under; where arms differ, each value with its arms."""
    pairs: list[tuple[str, Callable[[Arm], str]]] = [
        ("model", lambda arm: _model(arm.config)),
        ("device", lambda arm: _device(arm)),
        ("KV budget", lambda arm: _budget(arm)),
        ("lengths", lambda arm: _lengths(arm.config)),
        ("arrivals", lambda arm: _describe(_workload(arm.config).get("arrivals"))),
        ("requests", _requests),
        ("commit", lambda arm: _commit(arm)),
    ]
    found = [(name, value) for name, of_arm in pairs if (value := _merged(report.arms, of_arm))]
    plan = report.plan
    rest = [("seed", plan.get("seed")), ("trials", _blocks(report)), ("planned", plan.get("created"))]
    return found + [(name, str(value)) for name, value in rest if value not in (None, "")]


def _blocks(report: Report) -> str:
    """How many trials an arm has; of an adaptive study also by which rule it stopped."""
    plan = report.plan
    if not plan.get("trials"):
        return ""
    if plan.get("half_width") is None:
        return f"{plan['trials']} trials, interleaved"
    ran = max((len(arm.trials) for arm in report.arms), default=0)
    rule = f"{100 * plan['half_width']:g} % on either side, {percent(report.confidence, 0)} intervals"
    end = "" if ran < plan["trials"] else "; stopped by the limit"
    return f"{ran} of at most {plan['trials']} trials, interleaved; adaptive: {rule}{end}"


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


def _warnings(report: Report) -> list[Notice]:
    """By kind (what stands before the colon); each wording once, with the arms and trials that have it."""
    kinds: dict[str, dict[str, dict[str, list[int]]]] = {}
    for arm in report.arms:
        for text, trials in arm.warnings.items():
            kinds.setdefault(text.partition(":")[0], {}).setdefault(text, {})[arm.name] = trials
    notices = []
    for kind, texts in kinds.items():
        arms = list(dict.fromkeys(name for by_arm in texts.values() for name in by_arm))
        details = []
        for text, by_arm in texts.items():
            where = "; ".join(f"{name} {', '.join(map(str, trials))}" for name, trials in by_arm.items())
            details.append(f"{text.partition(':')[2].strip() or text} \u2014 trials: {where}")
        notices.append(Notice("warning", kind, arms, details))
    return notices


# --- texts ------------------------------------------------------------------------------------------------------------


def _has(arm: Arm, status: str) -> bool:
    return arm.entry["status"] == status or any(trial.run["status"] == status for trial in arm.trials)


def _reasons(arm: Arm, status: str) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for trial in arm.trials:
        if trial.run["status"] == status:
            for reason in trial.run["reasons"]:
                reasons.setdefault(str(reason), []).append(str(trial.run["trial"]))
    if not reasons:
        return [str(reason) for reason in arm.entry["reasons"]]
    return [f"{reason} (trial {', '.join(trials)})" for reason, trials in reasons.items()]


def _merged(arms: list[Arm], of_arm: Callable[[Arm], str]) -> str:
    by_value: dict[str, list[str]] = {}
    for arm in arms:
        by_value.setdefault(of_arm(arm), []).append(arm.name)
    by_value.pop("", None)
    if len(by_value) <= 1:
        return next(iter(by_value), "")
    if len(by_value) > 4:
        return f"{len(by_value)} values, see the settings"
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = config.get(name)
    return group if isinstance(group, Mapping) else {}


def _workload(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return _group(config, "workload")


def _model(config: Mapping[str, Any]) -> str:
    model = _group(config, "model")
    limit = f", max_model_len {model['max_model_len']:,}" if isinstance(model.get("max_model_len"), int) else ""
    return f"{model.get('path') or model['name']}{limit}" if model.get("name") else ""


def _provenance(arm: Arm) -> Mapping[str, Any]:
    trial: TrialRecord | None = arm.shown or (arm.trials[0] if arm.trials else None)
    return {} if trial is None else trial.run["provenance"]


def _device(arm: Arm) -> str:
    hardware = _provenance(arm).get("hardware") or {}
    if not hardware:
        return str(_group(arm.config, "device").get("name") or "")
    parts = [hardware.get("device"), hardware.get("name"), hardware.get("cpu_capability")]
    if hardware.get("cores"):
        parts.append(f"{hardware['cores']} cores, {hardware.get('threads')} threads")
    return ", ".join(str(part) for part in parts if part)


def _budget(arm: Arm) -> str:
    size = _group(arm.config, "kv_cache").get("budget_bytes")
    return byte_size(float(size)) if isinstance(size, int | float) else ""


def _lengths(config: Mapping[str, Any]) -> str:
    workload = _workload(config)
    parts = [
        f"{what} {text}"
        for what, key in (("prompt", "prompt_length"), ("output", "output_length"))
        if (text := _describe(workload.get(key)))
    ]
    if _group(workload, "sampling").get("ignore_eos"):
        parts.append("end of sequence ignored")
    return "; ".join(parts)


def _requests(arm: Arm) -> str:
    """How many of what, and what was done to them so that they fit or arrive in time."""
    workload, made = _workload(arm.config), _provenance(arm).get("workload") or {}
    if not workload:
        return ""
    count = made.get("num_requests") or workload.get("num_requests")
    parts = [f"{workload.get('name', 'workload')}{'' if count is None else f', {count} a trial'}"]
    if workload.get("time_scale", 1) != 1:
        parts.append(f"timestamps x{workload['time_scale']}")
    if made.get("num_clipped"):
        parts.append(f"{made['num_clipped']} prompts shortened to fit (overlength=clip)")
    if made.get("num_overlength"):
        parts.append(f"{made['num_overlength']} too long for max_model_len, rejected")
    return "; ".join(parts)


def _describe(law: object) -> str:
    """`uniform(low 32, high 96)` of a law's config group."""
    if not isinstance(law, Mapping):
        return ""
    name = law.get("law") or law.get("name") or ""
    options = [f"{key} {value}" for key, value in law.items() if key not in ("law", "name") and _plain(value)]
    return f"{name}({', '.join(options)})" if options else str(name)


def _plain(value: object) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _commit(arm: Arm) -> str:
    git = _provenance(arm).get("git") or {}
    commit = str(git.get("commit") or "")[:10]
    return f"{commit} + uncommitted changes" if commit and git.get("dirty") else commit


def _flatten(value: object, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        start = f"{prefix}." if prefix else ""
        return [pair for key, item in value.items() for pair in _flatten(item, f"{start}{key}")]
    return [(prefix, value if isinstance(value, str) else json.dumps(value, default=str))]
