"""What speaks against the figures: failures, arms that did not run, emulated speeds and the records' own warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.data import Arm, Report


@dataclass(frozen=True)
class Notice:
    """One thing to know before believing the figures; ``level``: error, not_run, warning or note."""

    level: str
    what: str
    arms: list[str]
    details: list[str]

    @property
    def whose(self) -> str:
        return enumerated(self.arms)


NAMES_CHARACTERS = 60


def enumerated(names: Sequence[str]) -> str:
    """The arms by name while that can be read; where it cannot, what stands beneath names them."""
    text = ", ".join(names)
    return text if len(names) == 1 or len(text) <= NAMES_CHARACTERS else f"{len(names)} arms"


def notices(report: Report) -> list[Notice]:
    """Failures first, then trials that did not run, emulated speeds, and the validity warnings by kind.

    An arm of which no trial ran is not here: the verdict table says why, and no figure is to be believed of it.
    """
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


def _has(arm: Arm, status: str) -> bool:
    if status == "not_run" and not arm.metrics:
        return False
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
