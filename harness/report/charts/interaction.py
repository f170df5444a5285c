"""Do gains multiply? What several techniques give together, beside the product of what each of them gives alone."""

from __future__ import annotations

from harness.interaction import Interaction, interactions
from harness.report.against import pairable
from harness.report.charts.precision import output_rate
from harness.report.charts.verdict import HEADLINE
from harness.report.data import Report
from harness.report.expected_and_seen import expected_and_seen
from harness.report.parts import MISSING, Cell, Chart, Table, label, number_cell, percent, text_cell, times
from harness.statistics import Ratio

MARKS = ("product of the single gains", "together")


def found(report: Report) -> list[Interaction]:
    """Of the output rate of a factorial study, whose arms are named by what they change: `paged`, `int8`, `paged+int8`.

    Arms that may not be compared with the baseline are left out, and with them what they are a part of; so are those
    without a speed.
    """
    baseline = report.arm(report.baseline)
    if baseline is None or not pairable(baseline, baseline):
        return []
    rates = {arm.name: arm.by_trial(output_rate) for arm in report.arms if pairable(arm, baseline)}
    all_found = interactions(HEADLINE, rates, baseline.name, adaptive=report.adaptive)
    return [each for each in all_found if each.joint.median is not None]


def chart(report: Report) -> Chart:
    title = "Interactions: what techniques give together beside the product of what each gives alone"
    rows = found(report)
    if not rows:
        nothing = "Needs arms that change several things at once beside arms that change each alone: study=interaction."
        return Chart("interaction", title, "", Table((), ()), empty=nothing)
    marks, names = [each.joint for each in rows], [label(each.arm, 40) for each in rows]
    axis = "gain in output tok/s (x, log scale)"
    traces, layout, height = expected_and_seen(MARKS, names, [each.product for each in rows], marks, axis)
    layout["xaxis"] |= {"type": "log", "dtick": "D1"}
    note = (
        f"Gains over {report.baseline}, which changes nothing, whichever baseline is chosen above. Together: median "
        f"and {percent(report.confidence, 0)} interval over the trials; product: of the medians of the single gains. "
        "Together / product is formed in each trial that has all of these arms: 1 where gains multiply, less where "
        "each takes away from the others, as where two remove the same bottleneck."
    )
    return Chart("interaction", title, note, _table(rows), traces, layout, height)


def reading(deviation: Ratio) -> str:
    """What together / product shows."""
    if deviation.low is None or deviation.high is None:
        return MISSING
    if deviation.low <= 1 <= deviation.high:
        return "no difference shown"
    return "less than the product" if deviation.high < 1 else "more than the product"


def _table(rows: list[Interaction]) -> Table:
    cells = [
        [
            text_cell(each.arm),
            _ratio(each.joint),
            Cell(times(each.product, None, None), each.product),
            _ratio(each.deviation),
            number_cell(each.deviation.n, 0),
            text_cell(reading(each.deviation)),
        ]
        for each in rows
    ]
    return Table(("arm", "together", "product of the single gains", "together / product", "trials (n)", "shown"), cells)


def _ratio(found: Ratio) -> Cell:
    return Cell(times(found.median, found.low, found.high), found.median)
