"""Prefix reuse: which prompt tokens the cache served, against those that a cache without limit could have served."""

from __future__ import annotations

from harness.report.bars import stacked_bars
from harness.report.data import Arm, Report
from harness.report.parts import Chart, Table, fixed, label, percent, text_cell

FOUND, MISSED, OWN = "found", "shared, but computed", "own"
LOOKS = {FOUND: ("@used", ""), MISSED: ("@ahead", "/"), OWN: ("@grid", "")}


def has_sharing(report: Report) -> bool:
    """Does any arm reuse prefixes at all?"""
    return any(_option(arm) not in ("off", None) for arm in report.arms)


def chart(report: Report) -> Chart:
    arms = [arm for arm in report.arms if arm.metrics.get("prefix_hit_rate_planned") is not None]
    rows = [(label(arm.name), _parts(arm)) for arm in arms]
    traces, layout, height = stacked_bars(LOOKS, rows, "prompt tokens", "%")
    layout["xaxis"] |= {"range": [0, 100]}
    note = (
        "Blue: served from the cache when the request first ran. Hatched: an earlier request of the traffic begins "
        "alike (blue and hatched are what was planned), but it was computed: nothing is reused, it was evicted, its "
        "block is not full, or both ran at once. Grey: nobody else begins so. In the table, beside the size of the "
        "cache, the ceiling: what one without limit would serve of this traffic, in whole blocks. What it is worth "
        "depends on how much of a request is prefill."
    )
    title = "Prompt tokens that were found in the KV cache"
    return Chart("prefix", title, note, _table(arms), traces, layout, height)


def _option(arm: Arm) -> str | None:
    return arm.trials[0].run["axes"].get("prefix") if arm.trials else None


def _parts(arm: Arm) -> dict[str, float]:
    planned, found = arm.metrics["prefix_hit_rate_planned"] or 0.0, arm.metrics.get("prefix_hit_rate_observed") or 0.0
    return {FOUND: 100 * found, MISSED: 100 * max(0.0, planned - found), OWN: 100 * (1 - max(planned, found))}


def _table(arms: list[Arm]) -> Table:
    rows = []
    for arm in arms:
        rows.append(
            [
                text_cell(arm.name),
                text_cell(_option(arm)),
                arm.cell("kv_capacity_tokens", fixed(0)),
                *(arm.cell(f"prefix_hit_rate_{of}", percent) for of in ("planned", "ceiling", "observed")),
                arm.cell("ttft_s.p50", fixed(3)),
                arm.cell("output_tokens_per_s", fixed(1)),
            ]
        )
    columns = ("arm", "prefix", "cache (tokens)", "planned", "ceiling", "observed", "TTFT p50 (s)", "output tok/s")
    return Table(columns, rows)
