"""Where a step's time goes."""

from __future__ import annotations

from harness.report.bars import stacked_bars
from harness.report.data import Arm, Report
from harness.report.parts import MISSING, Cell, Chart, Table, label, number_cell, percent_cell, text_cell

# The forward pass is two of them where a trial told its attention apart, and one where it could not.
PHASES = {
    "schedule": ("@phase0", ""),
    "prepare": ("@phase1", "/"),
    "attention": ("@prefill", "|"),
    "forward": ("@phase2", ""),
    "sample": ("@phase3", "\\"),
    "propose": ("@phase4", "x"),
    "commit": ("@phase5", "."),
    "other": ("@muted", "-"),
}


def phase_seconds(arm: Arm) -> dict[str, float]:
    """Seconds by phase over all ok trials; ``other`` is what of the steps' time no phase claims.

    ``forward`` is the forward pass without ``attention``, or all of it, and ``attention`` missing, where some trial
    did not tell that apart.
    """
    trials = arm.figures.trials
    measured = [phase for phase in PHASES if phase != "other"]
    seconds = {phase: sum(trial.phases_s[phase] for trial in trials) for phase in measured}
    if all(trial.attention_known for trial in trials):
        seconds["forward"] -= seconds["attention"]
    else:
        del seconds["attention"]
    total = sum(trial.steps_s for trial in trials)
    return {**seconds, "other": max(0.0, total - sum(seconds.values()))}


def chart(report: Report) -> Chart:
    title = "Where a step's time goes"
    ran = [arm for arm in report.arms if any(trial.num_steps for trial in arm.figures.trials)]
    found = {arm.name: phase_seconds(arm) for arm in ran}
    seen = [arm for arm in report.arms if sum(found.get(arm.name, {}).values()) > 0]
    if not seen:
        return Chart("steptime", title, "", Table((), ()), empty="No ok trial recorded the time of its steps.")
    rows = []
    for arm in seen:
        seconds = found[arm.name]
        total = sum(seconds.values())
        rows.append((label(arm.name, 28), {phase: 100 * value / total for phase, value in seconds.items()}))
    traces, layout, height = stacked_bars(PHASES, rows, "share of the steps' time", "%")
    layout["xaxis"]["range"] = [0, 100]
    note = (
        "All steps of all ok trials, drain included; attention: the layers' storing and reading of K/V, forward: the "
        "forward pass without it (with it where the table shows none); other: what no phase claims. Shares are of all "
        "phases together: with execution.overlap=on those of two steps run at once, and a step is shorter than its own."
    )
    return Chart("steptime", title, note, _table(seen, found), traces, layout, height)


def _table(arms: list[Arm], found: dict[str, dict[str, float]]) -> Table:
    rows = []
    for arm in arms:
        seconds = found[arm.name]
        trials, total = arm.figures.trials, sum(seconds.values())
        steps = sum(trial.num_steps for trial in trials)
        mean = sum(trial.steps_s for trial in trials) / steps
        shares = (percent_cell(seconds[p] / total) if p in seconds else Cell(MISSING) for p in PHASES)
        rows.append([text_cell(arm.name), number_cell(steps, 0), number_cell(1e3 * mean, 2), *shares])
    return Table(("arm", "steps (n)", "mean step (ms)", *PHASES), rows)
