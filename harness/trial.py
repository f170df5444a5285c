"""One arm, one trial: build, warm up, drive, record."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch

from harness.drive import RealClock, drive
from harness.errors import one_line
from harness.limits import cost_of_step, resident_models
from harness.linear_stages import Record, linear_stage_times, row_counts
from harness.memory import PeakMemory
from harness.metrics import compute_metrics, request_latencies
from harness.probe import peaks
from harness.provenance import provenance
from harness.recorder import Recorder
from harness.records import SCHEMA_VERSION, write_trial
from harness.telemetry.gpu import gpu_source
from harness.telemetry.host import HostSource, ProcessSource, host_load
from harness.telemetry.options import TelemetryOptions
from harness.telemetry.profiler import Profile, profile_steps
from harness.telemetry.sampler import Sampler, Source
from harness.validity import busy_host
from harness.warm_up import warm_up
from impls.build import KV_DTYPES, build_engine, construct, kv_dtype_name, max_model_len
from impls.engine import Engine
from impls.models.source import open_model
from impls.seams import StepResult
from impls.user_cache import cache_dir
from workloads import build_stream


@dataclass
class Progress:
    """What a watcher may want to know; counts that stand still are what a hang looks like."""

    phase: str = "starting"
    steps: int = 0
    waits: int = 0  # for an arrival; neither steps nor waits advancing is a hang
    output_tokens: int = 0
    finished: int = 0
    requests: int = 0


def run_trial(
    config: Mapping[str, Any],
    *,
    study: str,
    arm: str,
    trial: int,
    seed: int,
    out_dir: Path,
    isolated: bool = True,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """Measure one trial and write its record to ``out_dir``; returns its status: ok, aborted or, by `judge`,
    failed. Errors propagate.

    ``isolated``: this process runs nothing else, so that its start-up time and peak memory are the trial's.
    """
    progress = Progress()
    on_progress(progress)
    load_before = host_load()
    device = str(config["device"]["name"])
    if config["device"].get("threads"):
        torch.set_num_threads(int(config["device"]["threads"]))
    source = open_model(config["model"])
    length = max_model_len(config, source)
    stream = build_stream(
        config["workload"],
        seed=seed,
        tokenizer=source.tokenizer,
        max_model_len=length,
        vocab_size=source.shape.vocab_size,
    )
    clock = RealClock()
    engine = build_engine(config, source, clock)
    source_of_figures = provenance(device, kernels(engine))

    def tick() -> None:
        progress.waits += 1
        on_progress(progress)

    progress.phase = "warming up"
    warmed = warm_up(engine, stream, tick)
    method = engine.executor.model.method
    roof = peaks(device, str(config["precision"]["name"]), method, cache_dir())
    initial = stream.initial()

    progress.phase, progress.requests = "measuring", stream.num_requests
    recorder = Recorder()
    memory = PeakMemory(device)
    gpus = gpu_source() if device == "cuda" else None
    options: TelemetryOptions = construct(config["telemetry"])
    sources: list[Source] = [ProcessSource(), HostSource(), *([gpus] if gpus else [])]

    def on_step(result: StepResult) -> None:
        progress.steps += result.stats is not None
        progress.waits += result.stats is None
        progress.output_tokens += sum(len(e.token_ids) for e in result.emissions)
        progress.finished += sum(e.finish_reason is not None for e in result.emissions)
        on_progress(progress)

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        memory.reset()
        clock.restart()
        with Sampler(sources, clock, options.rate_hz) as sampler:
            completed = drive(
                engine, stream, recorder, clock, initial=initial, on_step=on_step, should_stop=should_stop
            )
        telemetry = sampler.stop()
    finally:
        gc.enable()
        gc.unfreeze()
    peak_memory = memory.read()
    load_after = host_load()
    progress.phase = "finishing"
    on_progress(progress)
    stages, trouble = time_linear_layers(engine) if completed else (None, [])

    models = resident_models(engine, KV_DTYPES[kv_dtype_name(config)].itemsize)
    requests, steps = recorder.requests(), recorder.steps(lambda stats: cost_of_step(models, stats))
    window, metrics, warnings = compute_metrics(
        requests,
        steps,
        telemetry,
        window_rule=stream.window_rule,
        warmup_s=stream.warmup_s,
        last_arrival_s=stream.last_arrival_s,
        max_num_seqs=int(config["batching"]["max_num_seqs"]),
        kv_layout=str(config["kv_cache"]["name"]),
        slo={key: limit for key, limit in config["slo"].items() if key != "name"},
        price_per_hour=config["price"].get("per_hour"),
        extras={
            "weights_bytes": engine.weights_bytes,
            "peak_memory_bytes": peak_memory if isolated or device == "cuda" else None,
            "startup_s": warmed.startup_s if isolated else None,
            "peaks": roof,
            "speculation": engine.decoder.uses_proposer,
            "ignore_eos": bool(config["workload"].get("sampling", {}).get("ignore_eos")),
        },
    )
    profile = Profile()
    if completed:
        profile = profile_steps(engine, recorder.sent(), requests, steps, options, tick=tick, should_stop=should_stop)
    status, reasons = ("aborted", ["stopped by the user"]) if not completed else judge(requests)
    run = {
        "schema_version": SCHEMA_VERSION,
        "study": study,
        "arm": arm,
        "trial": trial,
        "status": status,
        "reasons": reasons,
        "config": dict(config),
        "axes": {
            group: chosen["name"]
            for group, chosen in config.items()
            if isinstance(chosen, Mapping) and "name" in chosen
        },
        "seed": seed,
        "provenance": source_of_figures
        | {"model": {"name": source.name, "fingerprint": source.fingerprint}}
        | {"host_before": load_before, "host_after": load_after, "workload": stream.provenance}
        | {"telemetry_cost": asdict(sampler.cost)},
        "window": window,
        "metrics": metrics,
        "limits": {"flops_per_s": roof.flops_per_s, "bytes_per_s": roof.bytes_per_s, "source": roof.source},
        "validity": warnings
        + (unnatural_prompts(config["workload"]) if engine.decoder.uses_proposer else [])
        + busy_host(load_before["cpu_percent"], telemetry, window, psutil.cpu_count() or 1)
        + trouble
        + [*profile.warnings]
        + ([f"telemetry ended early: {one_line(sampler.error)}"] if sampler.error else []),
        "clock": "real",
        "emulated": emulated(engine),
        "decode_costs": warmed.decode_costs,
        "linear_stages": stages,
        "profile": profile.summary,
    }
    engine.close()
    write_trial(out_dir, run, requests, steps, telemetry, profile.trace)
    return status


def time_linear_layers(engine: Engine) -> tuple[list[Record] | None, list[str]]:
    """`linear_stage_times` and warnings: a window that has been measured is not lost to what comes after it."""
    try:
        return linear_stage_times(engine.executor.model, row_counts(engine.scheduler.max_num_seqs)), []
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError when a device is out of memory
        return None, [f"the linear layers could not be timed: {one_line(str(error))}"]


def judge(requests: pd.DataFrame) -> tuple[str, list[str]]:
    """(status, reasons) of a trial that ran to its end: failed if any request failed, or if none finished.

    Whoever fails leaves the machine to the others: the arm has done less work than the one beside it, and none of its
    figures compares. ``requests``: all of the trial's, inside its window or not. A rejected one has never begun.
    """
    outcomes = request_latencies(requests)["outcome"].to_list()
    finished, failed, rejected = (outcomes.count(what) for what in ("finished", "failed", "rejected"))
    if not failed and (finished or not outcomes):
        return "ok", []
    blamed = "failed" if failed else "rejected"
    errors = requests["error"][[outcome == blamed for outcome in outcomes]].dropna()
    counts = f"of {len(outcomes)} requests {finished} finished, {failed} failed, {rejected} were rejected"
    return "failed", [": ".join([counts, *map(one_line, errors[:1])])]


def kernels(engine: Engine) -> dict[str, str]:
    """Which kernels this arm reaches on this device."""
    method = engine.executor.model.method
    attention = type(engine.executor.attention).__name__
    return {"linear": method.kernel, "head": method.head_method().kernel, "attention": attention}


def emulated(engine: Engine) -> list[str]:
    parts = (engine.executor.model.method, engine.decoder)
    return [note for note in (getattr(part, "emulated", None) for part in parts) if note]


def unnatural_prompts(workload: Mapping[str, Any]) -> list[str]:
    """For a speculation arm: ``workload`` is its resolved config. A replay's prompts are the trace's own affair."""
    prompts = workload["prompts"]
    random = "random" in (prompts.get("law", prompts["name"]), prompts.get("style"))
    if not random or workload["arrivals"]["name"] == "replay":
        return []
    return ["unnatural prompts: random tokens; their acceptance rate says nothing about text"]
