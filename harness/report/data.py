"""What the charts read: a run's records beside its summary, arm by arm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from harness.records import StudyRecord, TrialRecord, read_run
from harness.report.figures import ArmFigures, arm_figures
from harness.report.parts import Cell
from harness.summary import confidence_of, is_adaptive, summary_of

CURVE_POINTS = 400

NUM_COLOURS = 7
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "triangle-down")


@dataclass(frozen=True)
class Arm:
    """One arm of ``num_arms``: ``entry`` is its part of `summary.json`, ``plan`` its part of `study.json`."""

    name: str
    index: int
    entry: Mapping[str, Any]
    plan: Mapping[str, Any]
    trials: list[TrialRecord]
    num_arms: int = 1

    @cached_property
    def ok(self) -> list[TrialRecord]:
        return [trial for trial in self.trials if trial.run["status"] == "ok"]

    @cached_property
    def shown(self) -> TrialRecord | None:
        """The trial that timelines show: the first that is ok, else the first that ran any step."""
        ran = next((trial for trial in self.ok if trial.num_steps), None)
        return ran or next((trial for trial in self.trials if trial.num_steps), None)

    @cached_property
    def figures(self) -> ArmFigures:
        """What is shown of all its ok trials; their tables are read for it, and not kept."""
        return arm_figures(self.ok, points(CURVE_POINTS, self.num_arms))

    def by_trial(self, value: Callable[[TrialRecord], float | None]) -> dict[int, float]:
        """Trial number -> value, of the ok trials that have it."""
        found = {int(trial.run["trial"]): value(trial) for trial in self.ok}
        return {number: known for number, known in found.items() if known is not None}

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Medians over its trials, by flat name (`ttft_s.p50`), as in summary.json."""
        found: Mapping[str, float | None] = self.entry["metrics"]
        return found

    def cell(self, metric: str, text: Callable[[float | None], str], style: str = "") -> Cell:
        """A metric of the summary as the cell of a table, which names its place there."""
        source = (self.name, "metrics", metric) if metric in self.metrics else ()
        value = self.metrics.get(metric)
        return Cell(text(value), value, source, style=style)

    @property
    def config(self) -> Mapping[str, Any]:
        """Of its first trial; as it was planned where none is recorded."""
        if self.trials:
            return dict(self.trials[0].run["config"])
        return dict(self.plan.get("config") or {})

    @property
    def emulated(self) -> list[str]:
        """What any of its trials was labelled with, each once."""
        return list(dict.fromkeys(str(note) for trial in self.trials for note in trial.run["emulated"] or []))

    @property
    def badge(self) -> str:
        """Where its figures come from; empty if it has none."""
        if not self.metrics:
            return ""
        if any(trial.run["clock"] == "virtual" for trial in self.trials):
            return "simulated"
        return "emulated" if self.emulated else "measured"

    @property
    def warnings(self) -> dict[str, list[int]]:
        """Validity warning, or one of its pairs -> the trials that carry it."""
        found: dict[str, list[int]] = {text: list(numbers) for text, numbers in self.entry["warnings"].items()}
        for trial in self.trials:
            for text in trial.run["validity"]:
                found.setdefault(str(text), []).append(trial.run["trial"])
        return found

    # Two arms are told apart by dash or marker as well as by colour.
    @property
    def colour(self) -> str:
        return f"@arm{self.index % NUM_COLOURS}"

    @property
    def dash(self) -> str:
        return DASHES[(self.index + self.index // NUM_COLOURS) % len(DASHES)]

    @property
    def marker(self) -> str:
        return MARKERS[(self.index + self.index // NUM_COLOURS) % len(MARKERS)]


@dataclass(frozen=True)
class Report:
    """A run as the report sees it; arms in the plan's order."""

    record: StudyRecord
    summary: Mapping[str, Any]
    arms: list[Arm]

    @property
    def plan(self) -> Mapping[str, Any]:
        return self.record.plan

    @property
    def baseline(self) -> str | None:
        name = self.summary["baseline"]
        return None if name is None else str(name)

    @property
    def adaptive(self) -> bool:
        return is_adaptive(self.plan)

    @property
    def confidence(self) -> float:
        """The level of every interval here."""
        return confidence_of(self.plan)

    def arm(self, name: str | None) -> Arm | None:
        return next((arm for arm in self.arms if arm.name == name), None)

    def below(self, arm: Arm) -> Arm | None:
        """The arm that it builds on, else the baseline; None for the baseline itself."""
        found = self.arm(arm.entry["versus"]) or self.arm(self.baseline)
        return None if found is arm else found

    def points(self, wanted: int, least: int = 60) -> int:
        """Of a line in this report."""
        return points(wanted, len(self.arms), least)


def points(wanted: int, num_arms: int, least: int = 60) -> int:
    """How many points a line may have, so that a report of many arms stays small: ``wanted`` for up to 8 arms."""
    return max(least, min(wanted, 8 * wanted // max(1, num_arms)))


def middle(values: Iterable[float]) -> float | None:
    """The median; None of nothing."""
    known = list(values)
    return median(known) if known else None


def load(run_dir: Path, study: StudyRecord | None = None, summary: Mapping[str, Any] | None = None) -> Report:
    """RecordError if a record of the run cannot be read. study, summary: of it, where they have been made already."""
    record = study or read_run(run_dir)
    summary = summary or summary_of(record)
    entries: Mapping[str, Any] = summary["arms"]
    arms = [
        Arm(name, index, entry, record.plan["arms"][name] or {}, record.of_arm(name), len(entries))
        for index, (name, entry) in enumerate(entries.items())
    ]
    return Report(record, summary, arms)
