"""From a loaded report to one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import functools
import gzip
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import groupby
from pathlib import Path

import jinja2
from markupsafe import Markup

from harness.report.charts import (
    conditions,
    decode_step,
    gantt,
    interaction,
    kv_memory,
    latency,
    linear_layers,
    load,
    notices,
    operators,
    precision,
    prefix_reuse,
    provenance,
    roofline,
    slots,
    speculation,
    speculation_gain,
    speedup,
    step_time,
    swaps,
    telemetry,
    tradeoff,
    verdict,
    verdict_columns,
)
from harness.report.compare import browser_data
from harness.report.compare_filter import tagged
from harness.report.data import Report
from harness.report.parts import Chart, percent
from harness.report.tables import attributes, breakable, table, td

ASSETS = Path(__file__).parent / "assets"


def render(report: Report) -> str:
    """The same records give the same bytes."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(table=table, td=td, attributes=attributes, breakable=breakable)
    found = sections(report)
    return environment.get_template("page.html").render(
        study=str(report.plan.get("study") or report.record.path.name),
        baseline=report.baseline,
        level=percent(report.confidence, 0),
        command=report.plan.get("command"),
        conditions=conditions.conditions(report),
        arms=report.arms,
        rows=verdict.rows(report),
        columns=verdict_columns.columns(report),
        headings=verdict_columns.headings(verdict_columns.columns(report)),
        trials=browser_data(report),
        metrics_table=verdict.metrics_table(report),
        notices=notices.notices(report),
        sections=[
            (title, [tagged(chart, report.arms) for chart in drawn])
            for title, charts in found
            if (drawn := placed(charts))
        ],
        absent=[chart for _, charts in found for chart in charts if not chart.traces],
        details=[
            ("Trials", provenance.trials_table(report)),
            ("Equivalence of the arms' tokens", provenance.equivalence_table(report)),
            ("Machine, versions and limits", provenance.machine_table(report)),
            ("Settings", provenance.settings_table(report)),
        ],
        style=asset("report.css"),
        script=asset("report.js") + asset("compare.js"),
        plotly=plotly_base64(),
    )


def sections(report: Report) -> list[tuple[str, list[Chart]]]:
    """By their titles, in the page's order; what has no traces is only named, at its end. Load and KV dtype are there
    only where these were swept, reuse where an arm shares prefixes, interactions where arms combine what others change
    alone, operators where a trial was profiled, swaps where an arm swapped.
    """
    profiled = [operators.chart(report)] if operators.has_profiles(report) else []
    swept = [("Load", [load.chart(report)])] if load.sweeps(report) else []
    sizes = [precision.chart(report, kept) for kept in (precision.WEIGHTS, precision.KEYS_AND_VALUES)]
    swapped = [swaps.chart(report)] if swaps.swaps(report) else []
    reused = [("Prefix reuse", [prefix_reuse.chart(report)])] if prefix_reuse.has_sharing(report) else []
    combined = [("Interactions", [interaction.chart(report)])] if interaction.found(report) else []
    by_batch = [speculation_gain.chart(report)] if speculation_gain.lines(report) else []
    return [
        ("Occupancy", [slots.chart(report), kv_memory.chart(report)]),
        *swept,
        *reused,
        ("Speed", [tradeoff.chart(report), step_time.chart(report)]),
        *combined,
        ("Where it is gained or lost", [decode_step.chart(report), linear_layers.chart(report), *profiled]),
        ("Against the machine", [roofline.chart(report), *(sizes if sizes[1].traces else sizes[:1])]),
        ("Latency", [latency.chart(report, what) for what in (latency.TTFT, latency.ITL, latency.E2E)]),
        ("Speculation", [speculation.chart(report), speedup.chart(report), *by_batch]),
        ("Requests and machine", [gantt.chart(report), *swapped, telemetry.chart(report)]),
    ]


def placed(charts: Sequence[Chart]) -> list[Chart]:
    """Those that show something, as they stand: two beside one another, and across the page what is wide or left."""
    found: list[Chart] = []
    for wide, group in groupby((chart for chart in charts if chart.traces), key=lambda chart: chart.wide):
        *others, last = group
        found += [*others, replace(last, wide=wide or len(others) % 2 == 0)]
    return found


def asset(name: str) -> Markup:
    """A file of ours to stand in the page as it is."""
    return Markup((ASSETS / name).read_text("utf-8"))


@functools.cache
def plotly_base64() -> Markup:
    """The installed plotly's own plotly.js, packed: 2 MB instead of 5."""
    source = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return Markup(base64.b64encode(gzip.compress(source, 9, mtime=0)).decode("ascii"))
