"""The tables of docs/findings.md, from the records in results/reference.

    python -m scripts.findings

Each block of the page that begins with `<!-- begin: <folder> -->` becomes the table of that study's records, and
`<!-- begin: <folder>:products -->` that of how the gains of a factorial study combine. A folder is one of
results/reference/cpu, or says of which machine it is: `cpu_avx512/ladder`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.interaction import interactions
from harness.statistics import Ratio
from harness.texts import times

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "results" / "reference"
RECORDS = REFERENCE / "cpu"
PAGE = ROOT / "docs" / "findings.md"
BLOCK = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

Arm = Mapping[str, Any]
Cell = Callable[[Arm], str]


@dataclass(frozen=True)
class Column:
    """One figure of each arm, as text."""

    name: str
    cell: Cell


def metric(name: str, key: str, digits: int, scale: float = 1.0) -> Column:
    """The median over the trials; n/a where a metric is undefined there."""

    def cell(arm: Arm) -> str:
        value = arm["metrics"].get(key)
        return "n/a" if value is None else f"{value * scale:,.{digits}f}" if value != "inf" else "inf"

    return Column(name, cell)


def ratio(name: str, key: str) -> Column:
    """Against the arm that this one is to be compared with: its `versus`, or the study's baseline."""

    def cell(arm: Arm) -> str:
        if (found := (arm["step_ratios"] if arm["versus"] else arm["ratios"]).get(key)) is None:
            return "n/a"  # a record from before the metric
        if found["n"] == 0 and found["verdict"] == "no difference shown":
            return "n/a"  # nothing was there to be compared
        itself = not arm["versus"] and (found["low"], found["high"]) == (1, 1)
        return "-" if itself else ratio_text(Ratio(**found))

    return Column(name, cell)


def quality(name: str, key: str, digits: int, scale: float = 1.0) -> Column:
    """Of held-out text, with its 95 % interval over the texts; n/a where none was asked for."""

    def cell(arm: Arm) -> str:
        if (found := (arm["quality"] or {}).get(key)) is None:
            return "n/a"
        value, low, high = (f"{found[of] * scale:,.{digits}f}" for of in ("value", "low", "high"))
        return f"{value} [{low}, {high}]"

    return Column(name, cell)


SPEED = (metric("output tok/s", "output_tokens_per_s", 1), ratio("ratio", "output_tokens_per_s"))
TTFT = (metric("TTFT p50 s", "ttft_s.p50", 2), metric("TTFT p99 s", "ttft_s.p99", 2))
ITL = (metric("ITL p50 ms", "itl_s.p50", 0, 1e3), metric("ITL p99 ms", "itl_s.p99", 0, 1e3))
ACCEPTED = metric("acceptance %", "acceptance_rate", 1, 100)
PREDICTED = (
    *(metric("predicted x", "speculation.predicted_speedup", 2), metric("c", "speculation.draft_cost", 3)),
    metric("v", "speculation.verify_cost", 2),
)
KV_WASTE = metric("KV used %", "kv_utilization", 1, 100)
HITS = metric("hits %", "prefix_hit_rate_observed", 1, 100)
REUSE = (
    *(metric("planned %", "prefix_hit_rate_planned", 1, 100), metric("ceiling %", "prefix_hit_rate_ceiling", 1, 100)),
    *(HITS, metric("cache, tokens", "kv_capacity_tokens", 0)),
)
KL_AND_TOP1 = (quality("KL", "kl_vs_bf16", 4), quality("top-1 %", "top1_agreement", 1, 100))
TTFT_RATIO = ratio("ratio of TTFT p50", "ttft_s.p50")
SLO = metric("SLO met %", "slo_attainment", 0, 100)
GOODPUT = (metric("good requests/s", "goodput_per_s", 2), ratio("ratio of goodput", "goodput_per_s"))

COLUMNS: dict[str, tuple[Column, ...]] = {
    "ladder": (*SPEED, *TTFT, metric("slots %", "slot_utilization", 1, 100), KV_WASTE),
    "controls": SPEED,
    "aa": (*SPEED, TTFT_RATIO, ratio("ratio of ITL p99", "itl_s.p99")),
    "chunked": (*SPEED, *ITL, ratio("ratio of ITL p99", "itl_s.p99"), *TTFT, TTFT_RATIO),
    "load": (*SPEED[:1], *TTFT, *ITL, *GOODPUT[:1], SLO),
    "prompt_lookup": (*SPEED, ACCEPTED),
    "eagle": (*SPEED, ACCEPTED, metric("tokens a step", "tokens_per_step", 2), *PREDICTED),
    "speculation": (*SPEED, ACCEPTED, metric("tokens a step", "tokens_per_step", 2), *PREDICTED),
    "prefix": (*SPEED, *TTFT, TTFT_RATIO, *REUSE),
    "precision": (
        *(metric("on disk MB", "checkpoint_bytes", 1, 1e-6), metric("weights MB", "weights_bytes", 1, 1e-6)),
        *(*SPEED, TTFT[0], ITL[0], ratio("ratio of ITL p50", "itl_s.p50"), metric("perplexity", "perplexity", 2)),
        *(quality("perplexity x", "perplexity_ratio", 3), *KL_AND_TOP1),
    ),
    "kv_dtype": (*SPEED, TTFT[0], TTFT_RATIO, ITL[0], ratio("ratio of ITL p50", "itl_s.p50"), *KL_AND_TOP1),
    "huggingface": (*SPEED, *TTFT, ITL[0]),
    "tour": (*SPEED, TTFT[0], TTFT_RATIO, ITL[1], ratio("ratio of ITL p99", "itl_s.p99")),
    "interaction": SPEED,
    "execution": (
        *(*SPEED, ITL[0], ratio("ratio of ITL p50", "itl_s.p50"), metric("first step s", "startup_s", 1)),
        metric("ready s", "ready_s", 1),
    ),
    "attention": (SPEED[0], TTFT[0], TTFT_RATIO, ITL[0], ratio("ratio of ITL p50", "itl_s.p50")),
    "sampling": (*SPEED, ACCEPTED, metric("tokens a step", "tokens_per_step", 2), *PREDICTED),
    "preemption": (
        *(*SPEED, TTFT[1], ITL[1], ratio("ratio of ITL p99", "itl_s.p99"), metric("preemptions", "preemptions", 0)),
        KV_WASTE,
    ),
    "order": (
        *(*SPEED, *TTFT, TTFT_RATIO, ratio("ratio of TTFT p99", "ttft_s.p99")),
        *(metric("urgent TTFT p99 s", "ttft_urgent_s.p99", 2), ratio("ratio of it", "ttft_urgent_s.p99"), *REUSE),
    ),
    "samples": (*SPEED, TTFT[0], TTFT_RATIO, *REUSE),
    "disaggregated": (*SPEED[:1], *TTFT, *ITL, *GOODPUT, SLO),
}


def table(folder: Path) -> str:
    """Markdown: one row an arm, and under it what was run, on what."""
    columns = COLUMNS[folder.name]
    arms = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["arms"]
    plan = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    compared = any(column.name.startswith("ratio") for column in columns)
    lines = [f"| arm | {'against | ' if compared else ''}{' | '.join(column.name for column in columns)} |"]
    lines.append(f"|---|{'---|' if compared else ''}{'---:|' * len(columns)}")
    for name, arm in arms.items():
        against = arm["versus"] or plan["baseline"]
        run = folder / name / "0" / "run.json"
        arm["quality"] = json.loads(run.read_text(encoding="utf-8")).get("quality") if run.exists() else None
        cells = [column.cell(arm) for column in columns] if arm["metrics"] else [arm["status"]] * len(columns)
        reference = [("" if against == name else against)] if compared else []
        lines.append(f"| {' | '.join([name, *reference, *cells])} |")
    run = json.loads(next(folder.glob("*/0/run.json")).read_text(encoding="utf-8"))
    trials = max(int(path.parent.name) for path in folder.glob("*/*/run.json")) + 1
    git = run["provenance"]["git"]
    commit = f"commit {git['commit'][:7]}{' with changes' if git['dirty'] else ''}"
    records = f"[records](../{folder.relative_to(ROOT).as_posix()})"
    lines += ["", f"`{plan['command']}`, {trials} trials; {plan['created'][:10]}, {commit}; {records}."]
    return "\n".join(lines)


def products(folder: Path) -> str:
    """Markdown: each joint gain of a factorial study beside the product of the single ones."""
    plan = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    values: dict[str, dict[int, float | None]] = {arm: {} for arm in plan["arms"]}
    for path in folder.glob("*/*/run.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        values[run["arm"]][run["trial"]] = run["metrics"]["output_tokens_per_s"]
    lines = ["| together | gain | product of the single gains | gain / product |", "|---|---:|---:|---:|"]
    for found in interactions("output_tokens_per_s", values, plan["baseline"]):
        product = "n/a" if found.product is None else f"{found.product:.2f}x"
        lines.append(f"| {found.arm} | {ratio_text(found.joint)} | {product} | {ratio_text(found.deviation)} |")
    return "\n".join(lines)


def ratio_text(found: Ratio) -> str:
    return times(found.median, found.low, found.high, missing=found.verdict)


def page(text: str) -> str:
    def block(found: re.Match[str]) -> str:
        name, _, kind = found[2].partition(":")
        made = (products if kind == "products" else table)((REFERENCE if "/" in name else RECORDS) / name)
        return f"{found[1]}\n{made}\n\n{found[3]}"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
