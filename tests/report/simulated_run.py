"""A run directory as a study leaves it, made by the scripted engine: the same seed, the same bytes.

Everything goes through the harness's own recorder, metrics and record writer, so the records are schema-true and the
figures in them belong to the steps beside them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scripted_engine import BUDGET_TOKENS, LADDER, MAX_MODEL_LEN, ArmPlan, Engine, burst

from harness.limits import StepCost
from harness.metrics import compute_metrics
from harness.recorder import Recorder
from harness.records import TELEMETRY_SCHEMA, frame, read_trial, write_json, write_trial

# Would be HTML, script, a template or a Plotly tag if anything let it.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}%{x}<b>"
HARDWARE = {"device": "cpu", "name": "Scripted CPU", "cpu_capability": "AVX2", "cores": 2, "threads": 2}


def config_of(plan: ArmPlan, num_requests: int) -> dict[str, Any]:
    return {
        "model": {"name": "scripted_135m", "path": None, "max_model_len": MAX_MODEL_LEN},
        "device": {"name": "cpu"},
        "batching": {"name": plan.batching, "max_num_seqs": plan.max_num_seqs},
        "kv_cache": {"name": plan.kv_cache, "budget_bytes": BUDGET_TOKENS * 23040},
        "decoding": {"name": "speculative" if plan.drafts else "autoregressive"},
        "precision": {"name": plan.precision},
        "kv_dtype": {"name": plan.kv_dtype},
        "workload": {
            "name": "scripted_burst",
            "num_requests": num_requests,
            "arrivals": {"name": "burst"},
            "prompt_length": {"name": "ladder", "law": "uniform", "low": 32, "high": 96},
            "output_length": {"name": "ladder", "law": "capped_exponential", "mean": 48.0, "cap": 192},
            "sampling": {"temperature": 0.0, "ignore_eos": True},
        },
        "seed": 0,
    }


def run_record(study: str, plan: ArmPlan, trial: int, num_requests: int, **changes: Any) -> dict[str, Any]:
    """run.json of a trial without measurements; ``changes`` replace its fields."""
    config = config_of(plan, num_requests)
    return {
        "study": study,
        "arm": plan.name,
        "trial": trial,
        "status": "ok",
        "reasons": [],
        "config": config,
        "axes": {group: body["name"] for group, body in config.items() if isinstance(body, dict)},
        "seed": 1000 + trial,
        "provenance": {
            "git": {"commit": "0123456789abcdef", "dirty": False},
            "versions": {"python": "3.11.7", "torch": "2.13.0", "cuda": None},
            "hardware": HARDWARE,
            "kernels": {"linear": "scripted"},
            "started": f"2026-01-02T03:0{trial}:00+00:00",
            "host_before": {"load_1m": 0.1, "cpu_percent": 2.0},
            "host_after": {"load_1m": 1.9, "cpu_percent": 80.0},
            "telemetry_cost": {"cpu_s": 0.004, "rounds": 20, "mean_round_s": 0.0002, "max_round_s": 0.001},
        },
        "window": {"start_s": None, "end_s": None, "rule": None},
        "metrics": {},
        "limits": {},
        "validity": [],
        "clock": "real",
        "emulated": list(plan.emulated),
        "decode_costs": decode_costs(plan),
        "linear_stages": linear_stages(plan),
        **changes,
    }


def decode_costs(plan: ArmPlan) -> list[dict[str, float]] | None:
    """A row costs a quarter of a millisecond on top of 20 ms."""
    if not plan.drafts:
        return None
    return [
        {"sequences": n, "rows": rows, "forward_s": plan.speed * (0.02 + 0.00025 * rows)}
        for n in (1, 4, plan.max_num_seqs)
        for rows in (n, n * (plan.drafts + 1))
    ]


def linear_stages(plan: ArmPlan) -> list[dict[str, float | None]]:
    """At 1 and 4 rows; 8-bit arms have stages, and a fused kernel that saves a tenth of their sum."""
    found: list[dict[str, float | None]] = []
    for rows in (1, 4):
        stages: dict[str, float | None] = dict.fromkeys(("quantize_s", "matmul_s", "rescale_s"))
        apply_s = 0.01 + 0.001 * rows
        if plan.precision in ("int8", "fp8"):
            stages = {"quantize_s": 0.001 * rows, "matmul_s": 0.5 * plan.speed * apply_s, "rescale_s": 0.002 * rows}
            apply_s = 0.9 * sum(filter(None, stages.values()))
        found.append({"rows": rows, "apply_s": apply_s, **stages})
    return found


def write_measured(
    run_dir: Path,
    study: str,
    plan: ArmPlan,
    trial: int,
    num_requests: int,
    more_metrics: Mapping[str, float] | None = None,
    gpus: int = 0,
    **changes: Any,
) -> None:
    """Simulate one trial and write its record; ``more_metrics``: of what this engine does not do."""
    rng = np.random.default_rng([7, trial])
    engine = Engine(plan, rng, 1 + 0.02 * float(rng.standard_normal()), burst(1000 + trial, num_requests))
    recorder = Recorder()
    for request in engine.waiting:
        recorder.submitted(request, 0.005)
    while engine.waiting or engine.live:
        recorder.step(engine.step())
    requests, steps = recorder.requests(), recorder.steps(lambda stats: StepCost(1e9, 2.7e8))
    telemetry = scripted_telemetry(float(steps["end_s"].max()), gpus)
    window, metrics, warnings = compute_metrics(
        requests,
        steps,
        telemetry,
        window_rule="burst",
        max_num_seqs=plan.max_num_seqs,
        kv_layout=plan.kv_cache,
        slo={"ttft_s": 2.0},
        extras={
            "peak_memory_bytes": 773_000_000,
            "weights_bytes": 325_000_000,
            "speculation": plan.drafts > 0,
            "ignore_eos": True,
            "decode_costs": decode_costs(plan),
        },
    )
    measured = {"window": window, "metrics": {**metrics, **(more_metrics or {})}, "validity": warnings}
    record = run_record(study, plan, trial, num_requests, **{**measured, **changes})
    write_trial(run_dir / plan.name.replace("/", "_") / str(trial), record, requests, steps, telemetry)


def scripted_telemetry(end_s: float, gpus: int = 0) -> Any:
    times = np.arange(0.0, end_s, 0.1)
    series = {
        ("process", "cpu_percent", "%"): 180 + 15 * np.sin(times),
        ("process", "resident_bytes", "B"): 7.6e8 + 1e6 * times,
        ("host", "cpu_percent", "%"): 92 + 5 * np.cos(times),
    }
    for gpu in range(gpus):
        series[(f"gpu{gpu}", "utilization_percent", "%")] = 70 + 20 * np.sin(times + gpu)
        series[(f"gpu{gpu}", "power_w", "W")] = 400 + 50 * np.cos(times)
        series[(f"gpu{gpu}", "sm_active_percent", "%")] = np.full(len(times), np.nan)  # refused by the device
        series[(f"gpu{gpu}", "pcie_sent_bytes_per_s", "B/s")] = 2e9 + 1e9 * np.sin(times)
        series[(f"gpu{gpu}", "pcie_received_bytes_per_s", "B/s")] = 3e9 + 1e9 * np.cos(times)
        # Held back by its power cap, or too hot, in half of the samples; idle (bit 1) is neither.
        series[(f"gpu{gpu}", "throttle_reasons", "bits")] = np.resize([0x1, 0x4, 0x0, 0x24], len(times)).astype(float)
    columns: dict[str, list[Any]] = {name: [] for name in TELEMETRY_SCHEMA.names}
    for (source, name, unit), values in series.items():
        columns["t_s"] += times.tolist()
        columns["source"] += [source] * len(times)
        columns["name"] += [name] * len(times)
        columns["value"] += values.tolist()
        columns["unit"] += [unit] * len(times)
    return frame(columns, TELEMETRY_SCHEMA)


def write_plan(run_dir: Path, plans: Sequence[ArmPlan], trials: int, num_requests: int, study: str = "ladder") -> None:
    shared = [f"study={study}"]
    arms = {
        plan.name: {
            "overrides": [
                *shared,
                f"batching={plan.batching}",
                f"kv_cache={plan.kv_cache}",
                f"batching.max_num_seqs={plan.max_num_seqs}",
                *(["decoding=speculative"] if plan.drafts else []),
                *([f"precision={plan.precision}"] if plan.precision != "bf16" else []),
                *([f"kv_dtype={plan.kv_dtype}"] if plan.kv_dtype != "auto" else []),
            ],
            "versus": plan.versus,
            "trials": trials,
            "reasons": [],
            "config": config_of(plan, num_requests),
        }
        for plan in plans
    }
    write_json(
        run_dir / "study.json",
        {
            "schema_version": 1,
            "study": study,
            "created": "2026-01-02T03:00:00+00:00",
            "command": f"python -m harness study={study}",
            "seed": 0,
            "trials": trials,
            "baseline": plans[0].name if plans else None,
            "arms": arms,
        },
    )


def write_run(
    run_dir: Path, plans: Sequence[ArmPlan] = LADDER, trials: int = 3, num_requests: int = 48, study: str = "ladder"
) -> Path:
    """A whole run; the emulated arms have one trial, as in the ladder."""
    write_plan(run_dir, plans, trials, num_requests, study)
    for plan in plans:
        for trial in range(1 if plan.emulated else trials):
            write_measured(run_dir, study, plan, trial, num_requests)
    return run_dir


def write_many(run_dir: Path, arms: int, trials: int, num_requests: int) -> Path:
    """A run of any size: five trials of each kind of arm are simulated; the others have their tables and differ in
    run.json.
    """
    plans = [replace(LADDER[i % 5], name=f"arm{i}", versus=f"arm{i - 1}" if i else None) for i in range(arms)]
    write_plan(run_dir, plans, trials, num_requests)
    for index, plan in enumerate(plans):
        for trial in range(trials):
            if index < 5 and trial < 5:
                write_measured(run_dir, "ladder", plan, trial, num_requests)
                continue
            made, folder = run_dir / f"arm{index % 5}" / str(trial % 5), run_dir / plan.name / str(trial)
            folder.mkdir(parents=True)
            for table in made.glob("*.parquet"):
                os.link(table, folder / table.name)
            run = json.loads((made / "run.json").read_text())
            (folder / "run.json").write_text(json.dumps(run | {"arm": plan.name, "trial": trial}))
    return run_dir


def taken(folder: Path) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """A trial's run.json, requests, steps and telemetry, out of its folder: to be changed and written there again."""
    trial = read_trial(folder)
    found = dict(trial.run), trial.requests, trial.steps, trial.telemetry
    shutil.rmtree(folder)
    return found
