"""What a running study shows: a bar with an ETA on a terminal, one line a trial elsewhere, and the table at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from harness.records import RecordError, decode_numbers, read_json
from harness.run_dir import KEPT, statuses
from harness.study import Plan
from harness.summary import no_pair, table_columns, table_rows
from harness.texts import number

WIDTH = 200  # of a table that goes to a file or a pipe


class Outlet:
    """A text stream that may fail (`| head` has ended, a log's disk is full) without ending what writes to it: a study
    is not lost for want of a listener. What cannot be written is left out, like all that follows.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        """What is still in the buffer goes to nowhere too, or it would fail once more when this process ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def make_console() -> Console:
    """On standard output; `WIDTH` columns where that is no terminal."""
    out = cast(TextIO, Outlet(sys.stdout))
    return Console(file=out, highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def complain(text: str) -> None:
    """On standard error, at once; lost where nobody reads it any more."""
    print(text, file=cast(TextIO, Outlet(sys.stderr)), flush=True)


class Reporter:
    """Follows one block; what earlier blocks took is read from their records, so the ETA spans the whole study."""

    def __init__(self, run_dir: Path, plan: Plan, block: int) -> None:
        self._run_dir, self._plan = run_dir, plan
        recorded = statuses(run_dir, plan)
        self._total = len(recorded)
        self._left = [  # what failed in an earlier block has had its turn
            (arm, trial)
            for (arm, trial), status in recorded.items()
            if status is None or (status not in KEPT and trial >= block)
        ]
        self._wall_s: dict[str, list[float]] = {}
        self._compared: set[tuple[str, str]] = set()
        for (arm, trial), status in recorded.items():
            if status in KEPT:
                run = self._run(arm, trial)
                self._note(arm, _recorded_seconds(run))
                self._compared.update(self._pairs(arm, trial))
        self._console = make_console()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[eta]}"))
        self._bar = Progress(*columns, console=self._console)
        self._task: TaskID | None = None
        self._current: tuple[str, int] | None = None
        self._began = 0.0

    def __enter__(self) -> Reporter:
        if self._console.is_terminal:
            self._task = self._bar.add_task("", total=self._total, eta="")
            self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._bar.stop()

    def say(self, text: str) -> None:
        """Above the bar, as it is: no markup, not wrapped."""
        self._console.print(text, markup=False, soft_wrap=True)

    def started(self, arm: str, trial: int) -> None:
        self._current, self._began = (arm, trial), time.monotonic()
        self._show(f"{arm} {trial}: starting", 0.0)

    def progress(self, report: Mapping[str, Any]) -> None:
        """From `harness.trial.Progress`: phase, steps, output_tokens, finished, requests."""
        if self._current is None or self._task is None:
            return
        arm, trial = self._current
        share = report["finished"] / report["requests"] if report["requests"] else 0.0
        detail = f"{report['finished']}/{report['requests']} requests, {report['output_tokens']} tokens"
        self._show(f"{arm} {trial}: {detail if report['requests'] else report['phase']}", share)

    def ended(self, arm: str, trial: int) -> None:
        """Print the trial's line, and the first ratio of each comparison that it completes."""
        run = self._run(arm, trial)
        if self._current == (arm, trial):
            self._note(arm, time.monotonic() - self._began)
        self._current = None
        self._left = [left for left in self._left if left != (arm, trial)]
        done = self._total - len(self._left)
        self.say(f"[{done:>{len(str(self._total))}}/{self._total}] {arm} {trial}: {trial_line(run)}{self._eta_text()}")
        for pair in self._pairs(arm, trial):
            if pair not in self._compared:
                self._compared.add(pair)
                self.say(f"      {pair[0]} / {pair[1]}: {self._ratio(*pair, trial):.2f}x output tok/s (first pair)")

    def _pairs(self, arm: str, trial: int) -> list[tuple[str, str]]:
        """Comparisons, against baseline and rung below, of which this trial is one half and the other is there."""
        arms = self._plan["arms"]
        references = {name: {self._plan["baseline"], arms[name]["versus"]} - {None, name} for name in arms}
        wanted = [(name, reference) for name in arms for reference in references[name]]
        return [pair for pair in sorted(wanted) if arm in pair and self._ratio(*pair, trial) is not None]

    def _ratio(self, arm: str, reference: str, trial: int) -> float | None:
        ours, theirs = (self._run(name, trial) for name in (arm, reference))
        if any(run.get("status") != "ok" for run in (ours, theirs)) or no_pair(ours, theirs):
            return None
        rates = [run["metrics"].get("output_tokens_per_s") for run in (ours, theirs)]
        return rates[0] / rates[1] if all(rates) else None

    def _run(self, arm: str, trial: int) -> dict[str, Any]:
        try:
            run = read_json(self._run_dir / arm / str(trial) / "run.json")
        except RecordError:
            return {}
        return run | {"metrics": decode_numbers(run.get("metrics", {}))}

    def _note(self, arm: str, seconds: float | None) -> None:
        if seconds is not None:
            self._wall_s.setdefault(arm, []).append(seconds)

    def _eta_s(self) -> float | None:
        """Each trial left takes what its arm took so far, or what the others took."""
        if not self._wall_s:
            return None
        means = {arm: sum(times) / len(times) for arm, times in self._wall_s.items()}
        usual = sum(means.values()) / len(means)
        left = sum(means.get(arm, usual) for arm, _ in self._left)
        running = time.monotonic() - self._began if self._current else 0.0
        return max(0.0, left - running)

    def _eta_text(self) -> str:
        seconds = self._eta_s()
        return "" if seconds is None or not self._left else f"  (ETA {clock_text(seconds)})"

    def _show(self, text: str, share: float) -> None:
        if self._task is not None:
            completed = self._total - len(self._left) + share
            seconds = self._eta_s()
            eta = "ETA --:--" if seconds is None else f"ETA {clock_text(seconds)}"
            self._bar.update(self._task, description=text, completed=completed, eta=eta)


def trial_line(run: Mapping[str, Any]) -> str:
    """Its main figures if it is ok, else its status and the reasons."""
    if run.get("status") != "ok":
        return f"{run.get('status', 'no record')}: {'; '.join(run.get('reasons', []))}"
    metrics = run["metrics"]
    ttft, itl = metrics.get("ttft_s") or {}, metrics.get("itl_s") or {}
    emulated = "  emulated" if run.get("emulated") else ""
    return (
        f"{number(metrics.get('output_tokens_per_s'), 1)} tok/s  TTFT p50 {number(ttft.get('p50'), 2)} s"
        f"  ITL p50 {number(itl.get('p50'), 1, 1e3)} ms{emulated}"
    )


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Arms as rows: the table that `harness.summary` defines, its ratios those of output tok/s."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(table_columns(summary)):
        table.add_column(column, justify="right" if index else "left")
    for row in table_rows(summary):
        table.add_row(*map(escape, row.values()))
    return table


def warning_lines(summary: Mapping[str, Any]) -> Iterable[str]:
    """What speaks against the table's ratios."""
    for arm, entry in summary["arms"].items():
        for text, trials in entry["warnings"].items():
            yield f"warning: {arm} {text} (trial {', '.join(map(str, trials))})"


def clock_text(seconds: float) -> str:
    """`m:ss`, from an hour on `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _recorded_seconds(run: Mapping[str, Any]) -> float | None:
    startup, end = run.get("metrics", {}).get("startup_s"), (run.get("window") or {}).get("end_s")
    return startup + end if startup is not None and isinstance(end, (int, float)) else None


def plan_lines(run_dir: Path, plan: Plan) -> Iterable[str]:
    """What is about to run."""
    trials = sum(len(block) for block in plan["order"])
    until = ""
    if plan.get("half_width") is not None:
        until = f" at most, until every interval is within {100 * plan['half_width']:g} % of its middle"
    yield f"study {plan['study']}: {len(plan['arms'])} arms, {trials} trials{until}, baseline {plan['baseline']}"
    yield f"records: {run_dir}"
    for name, arm in plan["arms"].items():
        for reason in arm["reasons"]:
            yield f"not run: {name}: {reason}"
