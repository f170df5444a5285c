"""Under which conditions the figures came about, where arms differ each value with its arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.records import TrialRecord
from harness.report.charts.notices import enumerated
from harness.report.data import Arm, Report
from harness.report.parts import byte_size, percent


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


def _merged(arms: list[Arm], of_arm: Callable[[Arm], str]) -> str:
    by_value: dict[str, list[str]] = {}
    for arm in arms:
        by_value.setdefault(of_arm(arm), []).append(arm.name)
    by_value.pop("", None)
    if len(by_value) <= 1:
        return next(iter(by_value), "")
    if len(by_value) > 4:
        return f"{len(by_value)} values, see the settings"
    return "; ".join(f"{value} ({enumerated(names)})" for value, names in by_value.items())


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
    """`uniform(low 32, high 96)` of a law's config group; of where its figures come from no more than the name."""
    if not isinstance(law, Mapping):
        return ""
    name = law.get("law") or law.get("name") or ""
    options = [
        f"{key} {str(value).partition(':')[0]}"
        for key, value in law.items()
        if key not in ("law", "name") and _plain(value)
    ]
    return f"{name}({', '.join(options)})" if options else str(name)


def _plain(value: object) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _commit(arm: Arm) -> str:
    git = _provenance(arm).get("git") or {}
    commit = str(git.get("commit") or "")[:10]
    return f"{commit} + uncommitted changes" if commit and git.get("dirty") else commit
