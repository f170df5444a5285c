"""What a decode step costs, attention told from the rest: where a change of the KV cache gains or loses its time."""

from __future__ import annotations

from harness.report.against import difference_cell, name_cell, pairable
from harness.report.bars import stacked_bars
from harness.report.data import Arm, Report, middle
from harness.report.figures import TrialFigures
from harness.report.parts import Chart, Table, label, number_cell, text_cell

PARTS = {
    "attention": ("@prefill", "|"),
    "other forward": ("@phase2", ""),
    "outside forward": ("@muted", "-"),
}
SEQUENCES = "sequences"


def decode_means(trial: TrialFigures) -> dict[str, float]:
    """Of its steps that decode and prefill nothing: the means of their `PARTS` in ms and of `SEQUENCES`, if known."""
    means = trial.decode
    if means is None:
        return {}
    seconds = (means.attention_s, means.forward_s - means.attention_s, means.step_s - means.forward_s)
    parts = {part: 1e3 * value for part, value in zip(PARTS, seconds, strict=True)}
    return {**parts, SEQUENCES: means.sequences}


def means_by_trial(arm: Arm) -> dict[str, dict[int, float]]:
    """Name -> trial number -> mean of its decode steps."""
    found = {trial.trial: decode_means(trial) for trial in arm.figures.trials}
    return {
        name: {number: means[name] for number, means in found.items() if name in means} for name in (*PARTS, SEQUENCES)
    }


def quantity(part: str) -> str:
    """What a part's means by trial are called where a reader compares arms."""
    return f"decode.{part.replace(' ', '_')}"


def chart(report: Report) -> Chart:
    title = "A decode step: attention against the rest"
    found = {arm.name: means_by_trial(arm) for arm in report.arms}
    seen = [arm for arm in report.arms if found[arm.name][SEQUENCES]]
    if not seen:
        nothing = "No ok trial told attention from the rest of its forward passes."
        return Chart("decode", title, "", Table((), ()), empty=nothing)
    bars, rows = [], []
    for arm in seen:
        ours, below = found[arm.name], report.below(arm)
        if below not in seen or not pairable(arm, below):
            below = None
        theirs = {} if below is None else found[below.name]
        medians = {name: value for name in ours if (value := middle(ours[name].values())) is not None}
        bars.append((label(arm.name, 28), medians))
        cells = [
            *(text_cell(arm.name), number_cell(sum(trial.num_decode_steps for trial in arm.figures.trials), 0)),
            *(number_cell(medians[SEQUENCES], 1), *(number_cell(medians[part], 2) for part in PARTS)),
            name_cell(below),
            *(difference_cell(ours[part], theirs.get(part, {}), quantity(part)) for part in PARTS),
        ]
        rows.append(cells)
    traces, layout, height = stacked_bars(PARTS, bars, "mean decode step", "ms")
    note = (
        "Steps that decode and prefill nothing. Attention: storing and reading K/V in all layers; outside forward: "
        "scheduling, preparing, sampling, drafting. Medians over the ok trials, differences paired by trial and to "
        "the arm it builds on or, if one is chosen above, to another baseline, none to or from an arm whose speed is "
        "emulated; steps with unlike numbers of sequences differ by that too."
    )
    parts = [f"{part} (ms)" for part in PARTS]
    columns = ("arm", "decode steps (n)", "sequences a step", *parts, "difference to", *(f"\u0394 {p}" for p in parts))
    return Chart("decode", title, note, Table(columns, rows), traces, layout, height)
