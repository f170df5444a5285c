"""One arm, one trial: build, warm up, drive, record."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pandas as pd
import psutil
import torch

from harness.drive import RealClock, drive
from harness.engine_facts import each, facts_of, time_linear_layers
from harness.errors import one_line
from harness.limits import Peaks, cost_of_step
from harness.memory import PeakMemory
from harness.metrics import compute_metrics, request_latencies
from harness.probe import peaks
from harness.provenance import provenance
from harness.quality import quality_metrics, quality_of_arm
from harness.recorder import Recorder
from harness.records import SCHEMA_VERSION, write_trial
from harness.telemetry.gpu import gpu_source
from harness.telemetry.host import HostSource, ProcessSource, host_load
from harness.telemetry.options import TelemetryOptions
from harness.telemetry.profiler import Profile, profile_steps
from harness.telemetry.sampler import Sampler, Source
from harness.validity import busy_host
from harness.warm_up import warm_up, warm_up_foreign, warm_up_workers
from impls.build import (
    KV_DTYPES,
    build_target,
    construct,
    has_workers,
    kv_dtype_name,
    max_model_len,
)
from impls.engine import Engine
from impls.models.source import open_model
from impls.seams import StepResult, Topology
from impls.user_cache import cache_dir
from workloads import build_stream

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Progress:
    """What a watcher may want to know; counts that stand still are what a hang looks like."""

    phase: str = "starting"
    steps: int = 0
    waits: int = 0  # for an arrival; neither steps nor waits advancing is a hang
    output_tokens: int = 0
    finished: int = 0
    requests: int = 0


def closing(function: Callable[Concatenate[ExitStack, P], T]) -> Callable[P, T]:
    """Close what ``function`` opens, however it ends: a target's thread would keep its process alive."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as opened:
            return function(opened, *args, **kwargs)

    return call


@closing
def run_trial(
    opened: ExitStack,
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
    target = build_target(config, source, clock)
    opened.callback(target.close)
    engine = target if isinstance(target, Engine) else None
    workers = target if isinstance(target, Topology) else None
    engines = facts_of(target, KV_DTYPES[kv_dtype_name(config)].itemsize)  # only ours show what figures are made of
    first = engines[0] if engines else None
    weights_bytes = sum(known.weights_bytes for known in engines)

    def tick() -> None:
        progress.waits += 1
        on_progress(progress)

    progress.phase = "warming up"
    if isinstance(target, Engine):
        source_of_figures = provenance(device, engines[0].kernels)
        warmed = warm_up(target, stream, tick)
        roof = peaks(device, str(config["precision"]["name"]), target.executor.model.method, cache_dir())
    elif isinstance(target, Topology):
        source_of_figures = provenance(device, engines[0].kernels)
        warmed = warm_up_workers(target, stream, tick)
        method = construct(config["precision"], device=torch.device(device))
        roof = peaks(device, str(config["precision"]["name"]), method, cache_dir())
    else:
        source_of_figures = provenance(device, dict(target.kernels))
        weights_bytes = target.weights_bytes
        warmed = warm_up_foreign(target, stream, int(config["batching"]["max_num_seqs"]), tick)
        roof = Peaks(None, None, "unknown")
    initial = stream.initial()

    progress.phase, progress.requests = "measuring", stream.num_requests
    recorder = Recorder()
    memory = PeakMemory(device, workers)
    gpus = gpu_source() if device == "cuda" else None
    options: TelemetryOptions = construct(config["telemetry"])
    own = ProcessSource(workers.pids if workers else ())
    sources: list[Source] = [own, HostSource(), *([gpus] if gpus else [])]

    def on_step(result: StepResult) -> None:
        ran = result.stats is not None or bool(result.emissions)
        progress.steps += ran
        progress.waits += not ran
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
                target, stream, recorder, clock, initial=initial, on_step=on_step, should_stop=should_stop
            )
        telemetry = sampler.stop()
    finally:
        gc.enable()
        gc.unfreeze()
    peak_memory = memory.read()
    load_after = host_load()
    progress.phase = "finishing"
    on_progress(progress)
    died = workers.deaths if workers else {}
    timed = (engine or workers) if completed and not died else None
    stages, trouble = each(timed, time_linear_layers, first_only=True)[0] if timed else (None, [])
    quality, unknown = quality_of_arm(engine, config, source, tick) if timed and trial == 0 else (None, [])

    cost = partial(cost_of_step, first.models) if first else None
    requests, steps = recorder.requests(), recorder.steps(cost)
    profile = Profile()
    if engine and completed:
        profile = profile_steps(engine, recorder.sent(), requests, steps, options, tick=tick, should_stop=should_stop)
    speculation = first is not None and first.speculation
    window, metrics, warnings = compute_metrics(
        requests,
        steps,
        telemetry,
        window_rule=stream.window_rule,
        warmup_s=stream.warmup_s,
        last_arrival_s=stream.last_arrival_s,
        max_num_seqs=most_sequences(config),
        kv_layout=str(config["kv_cache"]["name"]),
        slo={key: limit for key, limit in config["slo"].items() if key != "name"},
        price_per_hour=config["price"].get("per_hour"),
        extras={
            "weights_bytes": weights_bytes,
            "peak_memory_bytes": peak_memory if isolated or device == "cuda" else None,
            "startup_s": warmed.startup_s if isolated else None,
            "peaks": roof,
            "speculation": speculation,
            "ignore_eos": bool(config["workload"].get("sampling", {}).get("ignore_eos")),
            **transfers(requests),
            **quality_metrics(quality),
        },
    )
    status, reasons = ("aborted", ["stopped by the user"]) if not completed else judge(requests, died)
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
        + (unnatural_prompts(config["workload"]) if speculation else [])
        + busy_host(load_before["cpu_percent"], telemetry, window, psutil.cpu_count() or 1)
        + trouble
        + unknown
        + topology_notes(config, bool(requests["kv_transfer_bytes"].notna().any()))
        + [*profile.warnings]
        + ([f"telemetry ended early: {one_line(sampler.error)}"] if sampler.error else []),
        "clock": "real",
        "emulated": first.emulated if first else [],
        "decode_costs": warmed.decode_costs,
        "linear_stages": stages,
        "quality": quality,
        "profile": profile.summary,
    }
    write_trial(out_dir, run, requests, steps, telemetry, profile.trace)
    return status


def judge(requests: pd.DataFrame, died: Mapping[str, str] | None = None) -> tuple[str, list[str]]:
    """(status, reasons) of a trial that ran to its end: failed if any request failed, if none finished, or if a worker
    has died (by name, why) in whose place others may have done all of its work.

    Whoever fails leaves the machine to the others: the arm has done less work than the one beside it, and none of its
    figures compares. ``requests``: all of the trial's, inside its window or not. A rejected one has never begun.
    """
    outcomes = request_latencies(requests)["outcome"].to_list()
    finished, failed, rejected = (outcomes.count(what) for what in ("finished", "failed", "rejected"))
    if not failed and (finished or not outcomes):
        return ("failed", [f"worker {name} {why}" for name, why in died.items()]) if died else ("ok", [])
    blamed = "failed" if failed else "rejected"
    errors = requests["error"][[outcome == blamed for outcome in outcomes]].dropna()
    counts = f"of {len(outcomes)} requests {finished} finished, {failed} failed, {rejected} were rejected"
    return "failed", [": ".join([counts, *map(one_line, errors[:1])])]


def most_sequences(config: Mapping[str, Any]) -> int | None:
    """Rows of every engine of the arm; None where its engines do different work, each with rows of its own."""
    return None if config["topology"]["name"] == "disaggregated" else int(config["batching"]["max_num_seqs"])


def transfers(requests: pd.DataFrame) -> dict[str, float | None]:
    """Bytes and seconds of all keys and values that one worker copied from another; null where none did."""
    names = ("kv_transfer_bytes", "kv_transfer_s")
    return {name: float(requests[name].sum()) if requests[name].notna().any() else None for name in names}


def topology_notes(config: Mapping[str, Any], transferred: bool) -> list[str]:
    found = []
    if transferred and config["device"]["name"] == "cpu":
        found.append("shared memory bandwidth: keys and values pass between processes of one host, over no network")
    if has_workers(config) and config["telemetry"].get("profiler", "none") != "none":
        found.append("no profile: telemetry.profiler needs topology=colocated")
    return found


def unnatural_prompts(workload: Mapping[str, Any]) -> list[str]:
    """For a speculation arm: ``workload`` is its resolved config. A replay's prompts are the trace's own affair."""
    prompts = workload["prompts"]
    random = "random" in (prompts.get("law", prompts["name"]), prompts.get("style"))
    if not random or workload["arrivals"]["name"] == "replay":
        return []
    return ["unnatural prompts: random tokens; their acceptance rate says nothing about text"]
