"""Speculation: the decode speed-up that its own figures predict, beside the one that was measured."""

from __future__ import annotations

from collections.abc import Callable

from harness.report.against import following, name_cell, ratio_cell, ratio_to
from harness.report.charts.verdict import HEADLINE, below_cell
from harness.report.data import Arm, Report
from harness.report.expected_and_seen import expected_and_seen
from harness.report.parts import (
    Chart,
    Table,
    fixed,
    label,
    number,
    percent,
    text_cell,
    times,
)
from harness.statistics import Ratio

MARKS = ("predicted", "measured")
DECODE_RATE = "decode_rate"  # what `decode_rates` are called where a reader compares arms
PREDICTED = "speculation.predicted_speedup"
# What it is predicted from: heading, metric and text, as docs/speculation.md defines them.
FIGURES: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("d: drafting share", "speculation.drafting_share", percent),
    ("g: drafts", "speculation.draft_length", number),
    ("a: stands", "speculation.conditional_acceptance", percent),
    ("c: draft / step", "speculation.draft_cost", fixed(3)),
    ("v: rows / step", "speculation.verify_cost", number),
)
FORMULA = (
    "(1 + d (a + a\u00b2 + ... + a^g)) / (d g c + v). d: the share of a sequence's steps that verify drafts, g of them "
    "each; a: the probability that a draft stands if those before it did, from the tokens accepted a step; c: drafting "
    "one token each, v: the forward passes over all rows, both in forward passes over the same sequences without "
    "drafts; v from what so many rows took in warm-up."
)


def decode_rates(arm: Arm | None) -> dict[int, float]:
    """Trial number -> tokens a second that a sequence gets in steps that prefill nothing."""
    trials = [] if arm is None else arm.figures.trials
    return {trial.trial: trial.decode_rate for trial in trials if trial.decode_rate is not None}


def measured(report: Report, arm: Arm, other: Arm | None) -> Ratio:
    """Of the decode rates, arm over other, paired by trial."""
    return ratio_to(report, arm, other, decode_rates(arm), decode_rates(other))


def chart(report: Report) -> Chart:
    title = "Speculation: predicted beside measured"
    seen = [arm for arm in report.arms if any(trial.draft_tokens > 0 for trial in arm.figures.trials)]
    found = [(arm, measured(report, arm, report.below(arm))) for arm in seen]
    if not any(arm.metrics.get(PREDICTED) or ratio.median for arm, ratio in found):
        nothing = "No ok trial of an arm that drafts can be predicted or compared."
        return Chart("speedup", title, "", Table((), ()), empty=nothing)
    traces, layout, height = expected_and_seen(
        MARKS,
        [label(arm.name, 28) for arm in seen],
        [arm.metrics.get(PREDICTED) for arm in seen],
        [ratio for _, ratio in found],
        "decode speed-up (x)",
    )
    traces[1]["meta"] = following(DECODE_RATE, seen)
    note = (
        f"Predicted: {FORMULA} It leaves out sampling and longer contexts. Measured: tokens a second that a decoding "
        "sequence gets, paired by trial, against the arm it builds on or, if one is chosen above, another baseline; "
        "the prediction stays one against the same arm without drafts. Both of steps that prefill nothing; medians "
        f"over the ok trials, {percent(report.confidence, 0)} intervals."
    )
    return Chart("speedup", title, note, _table(report, found), traces, layout, height)


def _table(report: Report, found: list[tuple[Arm, Ratio]]) -> Table:
    rows = []
    for arm, theirs in found:
        below = report.below(arm)
        rows.append(
            [
                text_cell(arm.name),
                arm.cell("acceptance_rate", percent),
                arm.cell("tokens_per_step", number),
                *(arm.cell(metric, text) for _, metric, text in FIGURES),
                arm.cell(PREDICTED, lambda value: times(value, None, None)),
                ratio_cell(theirs, DECODE_RATE),
                name_cell(below),
                below_cell(arm, below, HEADLINE),
            ]
        )
    columns = (
        *("arm", "acceptance rate", "tokens a step", *(heading for heading, _, _ in FIGURES)),
        *("predicted", "measured", "measured against", "output tok/s"),
    )
    return Table(columns, rows)
