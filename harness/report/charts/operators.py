"""Time by operator group: what the steps of a profile spent on linear layers, attention and all else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.report.bars import stacked_bars
from harness.report.data import Arm, Report, middle
from harness.report.parts import MISSING, Cell, Chart, Table, label, number_cell, text_cell

# Group of the record -> what it is called, and how its bars look.
GROUPS = {
    "linear": ("linear layers", ("@phase2", "")),
    "head": ("LM head", ("@phase2", "/")),
    "attention": ("attention", ("@prefill", "|")),
    "kv_write": ("K/V write", ("@phase5", ".")),
    "elementwise": ("norm, activation, rotary", ("@phase1", "")),
    "embedding": ("embedding", ("@phase1", "x")),
    "sampling": ("sampling", ("@phase3", "\\")),
    "drafting": ("drafting", ("@phase4", "x")),
    "host": ("host", ("@muted", "-")),
}
KINDS = ("prefill", "decode")
Profile = Mapping[str, Any]


def group_seconds(profile: Profile, kind: str) -> dict[str, float]:
    """Seconds of a step of this kind by group, mean over those of the profile; empty if it has none.

    With a device they are its kernels' own, and ``host`` is what is left of the steps: no kernel ran. Without one they
    are the CPU's.
    """
    rows = [row for row in profile["operators"] if row["kind"] == kind]
    steps = profile["steps"][kind]
    if not steps:
        return {}
    on_device = any(row["device_s"] is not None for row in rows)
    column = "device_s" if on_device else "cpu_s"
    seconds = {group: sum(row[column] or 0.0 for row in rows if row["group"] == group) / steps for group in GROUPS}
    if on_device:
        rest = sum(row["cpu_s"] for row in rows) / steps - sum(seconds.values())
        seconds["host"] += max(0.0, rest)
    return {group: value for group, value in seconds.items() if value}


def has_profiles(report: Report) -> bool:
    return any(_profiles(arm) for arm in report.arms)


def _profiles(arm: Arm) -> list[Profile]:
    return [trial.run["profile"] for trial in arm.ok if trial.run.get("profile")]


def chart(report: Report) -> Chart:
    found: list[tuple[Arm, str, dict[str, float]]] = []
    for arm in report.arms:
        for kind in KINDS:
            by_trial = [seconds for profile in _profiles(arm) if (seconds := group_seconds(profile, kind))]
            groups = [group for group in GROUPS if any(group in seconds for seconds in by_trial)]
            medians = {group: middle(seconds.get(group, 0.0) for seconds in by_trial) or 0.0 for group in groups}
            if medians:
                found.append((arm, kind, medians))
    rows = []
    for arm, kind, seconds in found:
        length = sum(seconds.values())
        shares = {GROUPS[group][0]: 100 * value / length for group, value in seconds.items()}
        rows.append((f"{label(arm.name, 24)} \u00b7 {kind}", shares))
    traces, layout, height = stacked_bars(dict(GROUPS.values()), rows, "share of the steps' time in the profile", "%")
    layout["xaxis"]["range"] = [0, 100]
    note = (
        "After each trial's window some of its steps were run again under torch.profiler, those with prompt positions "
        "(prefill) apart from the others (decode). Profiling costs time, most of it where operators are small: the "
        "table has the steps' lengths in the window beside those in the profile. On a CPU: time in the operators of a "
        "group, host being all else. On a GPU: the time of its kernels, host being the time without one. Means over a "
        "profile's steps, medians over the ok trials. trace.json.gz of a trial opens in Perfetto or chrome://tracing."
    )
    tall = height + 40  # the legend has many entries
    return Chart("operators", "Time by operator group", note, _table(found), traces, layout, tall)


def _table(found: list[tuple[Arm, str, dict[str, float]]]) -> Table:
    used = [group for group in GROUPS if any(group in seconds for _, _, seconds in found)]
    rows = []
    for arm, kind, seconds in found:
        profiles = _profiles(arm)
        in_window = middle(p["window_s"][kind] for p in profiles if p["window_s"][kind] is not None)
        cells: list[Cell] = [text_cell(arm.name), text_cell(kind)]
        cells += [number_cell(sum(profile["steps"][kind] for profile in profiles), 0)]
        cells += [number_cell(value, 2, 1e3) for value in (in_window, sum(seconds.values()))]
        cells += [number_cell(seconds[g], 2, 1e3) if g in seconds else Cell(MISSING) for g in used]
        rows.append(cells)
    names = (f"{GROUPS[group][0]} (ms)" for group in used)
    return Table(("arm", "steps", "profiled (n)", "in the window (ms)", "in the profile (ms)", *names), rows)
