"""From a loaded report to one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import functools
import gzip
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from harness.report.charts import (
    decode_step,
    kv_memory,
    latency,
    linear_layers,
    provenance,
    slots,
    speculation,
    speedup,
    step_time,
    telemetry,
    tradeoff,
    verdict,
)
from harness.report.data import Report

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
    return environment.get_template("page.html").render(
        study=str(report.plan.get("study") or report.record.path.name),
        baseline=report.baseline,
        command=report.plan.get("command"),
        conditions=provenance.conditions(report),
        rows=verdict.rows(report),
        metrics_table=verdict.metrics_table(report),
        notices=provenance.notices(report),
        signature=[slots.chart(report), kv_memory.chart(report)],
        sections=[
            ("Speed", [tradeoff.chart(report), step_time.chart(report)]),
            ("Where it is gained or lost", [decode_step.chart(report), linear_layers.chart(report)]),
            ("Latency", [latency.chart(report, latency.TTFT), latency.chart(report, latency.ITL)]),
            ("Speculation", [speculation.chart(report), speedup.chart(report)]),
            ("Machine", [telemetry.chart(report)]),
        ],
        details=[
            ("Trials", provenance.trials_table(report)),
            ("Equivalence of the arms' tokens", provenance.equivalence_table(report)),
            ("Machine, versions and limits", provenance.machine_table(report)),
            ("Settings", provenance.settings_table(report)),
        ],
        style=asset("report.css"),
        script=asset("report.js"),
        plotly=plotly_base64(),
    )


def asset(name: str) -> Markup:
    """A file of ours to stand in the page as it is."""
    return Markup((ASSETS / name).read_text("utf-8"))


@functools.cache
def plotly_base64() -> Markup:
    """The installed plotly's own plotly.js, packed: 2 MB instead of 5."""
    source = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return Markup(base64.b64encode(gzip.compress(source, 9, mtime=0)).decode("ascii"))
