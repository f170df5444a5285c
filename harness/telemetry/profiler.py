"""`telemetry.profiler=torch`: a Chrome trace of some steps of a trial, and their time by operator group.

Profiling makes every operator slower, so it stays outside of the window: when the trial has been measured, some of its
steps are run again under the profiler, with the requests, contexts and arrivals (by step) that they had. No figure
of the trial is touched, and none is taken from the profile: it says where time goes, not how much there is of it.
"""

# mypy: allow-untyped-calls
# (`torch.profiler` carries few annotations.)

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, kineto_available, profile

from harness.driven import Driven
from harness.linear_stages import packed_layers
from harness.steps import Tick
from harness.telemetry.compiled_layers import layer_ranges
from harness.telemetry.excerpt import Excerpt, excerpt
from harness.telemetry.operators import STEP, operator_table, step_ranges
from harness.telemetry.options import TelemetryOptions
from harness.telemetry.ranges import ranges
from harness.texts import one_line
from impls.engine import Engine
from impls.execution.compiled import CompiledExecutor
from impls.models.llama import LlamaModel

KINDS = ("prefill", "decode")  # a step with prompt positions in it, and one without
SETTLE_S = 30.0  # what recomputing the contexts may take; then the profile begins with what is there


@dataclass(frozen=True)
class Profile:
    """``summary``: what run.json keeps, None without a profile. ``trace``: Chrome's JSON format, gzip. All empty where
    none was asked for.

    Keys of the summary: first_step, the number in steps.parquet of the first step that was run again; by kind of step:
    steps, how many the profile has, and window_s, what the same ones took in the window, their mean (null for none);
    operators, as `operators.operator_table` gives it.
    """

    summary: dict[str, Any] | None = None
    trace: bytes | None = None
    warnings: tuple[str, ...] = ()


def profile_steps(
    engine: Engine, seen: Driven, options: TelemetryOptions, *, tick: Tick, should_stop: Callable[[], bool]
) -> Profile:
    """Run some steps of a finished trial again, as ``options`` ask, and profile them.

    ``engine`` has ended all requests, and has ended all of these when this returns. Whatever hinders it is one line of
    `warnings`: what has been measured is not lost to it.
    """
    if options.profiler == "none":
        return Profile()
    if not kineto_available():
        return Profile(warnings=("telemetry.profiler=torch: no profile, this torch was built without Kineto",))
    scene = excerpt(seen, count=options.profiler_steps, at=options.profiler_at)
    if scene is None:
        return Profile(warnings=("telemetry.profiler=torch: no profile, the trial has no step",))
    engine.depth = 1  # one after another: what a thread of its own runs would be in no step
    try:
        _settle(engine, scene, tick, should_stop)
        trace, kinds = _run(engine, scene, tick, should_stop)
        table = operator_table(trace, kinds)
        trace["traceEvents"] += _layers(engine, trace)
    except (RuntimeError, MemoryError, OSError, ValueError, LookupError) as error:  # no memory, no disk, a cut trace
        return Profile(warnings=(f"telemetry.profiler=torch: no profile, {one_line(str(error)) or 'out of memory'}",))
    finally:
        engine.close()
    for number, (event, kind) in enumerate(zip(step_ranges(trace), kinds, strict=True), scene.first):
        event["name"] = f"step {number} ({kind or 'nothing to run'})"
    again = seen.steps.iloc[scene.first : scene.first + scene.count]
    is_prefill = again["prefill_tokens"].to_numpy(float) > 0
    lengths = (again["end_s"] - again["start_s"]).to_numpy(float)
    summary = {
        "first_step": scene.first,
        "steps": {kind: kinds.count(kind) for kind in KINDS},
        "window_s": {
            kind: float(lengths[seen].mean()) if seen.any() else None
            for kind, seen in zip(KINDS, (is_prefill, ~is_prefill), strict=True)
        },
        "operators": table,
    }
    return Profile(summary, gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 6, mtime=0))


def _layers(engine: Engine, trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a compiled model, in which no range can be entered."""
    executor = engine.executor
    if not isinstance(executor, CompiledExecutor) or not isinstance(executor.model, LlamaModel):
        return []
    model = executor.model
    with torch.inference_mode():
        return layer_ranges(trace, len(packed_layers(model, model.method.device)) // model.shape.num_layers)


def _settle(engine: Engine, scene: Excerpt, tick: Tick, should_stop: Callable[[], bool]) -> None:
    """Bring what ran before the excerpt back to where it stood, outside of the profile."""
    engine.kv.reset_prefixes()  # else every prompt would find itself
    for request in scene.running:
        engine.add_request(request)
    scheduler, begun, waited = engine.scheduler, time.perf_counter(), -1
    while engine.has_work and time.perf_counter() - begun < SETTLE_S and not should_stop():
        behind = any(each.num_computed_tokens < each.num_tokens - 1 for each in scheduler.running)
        if not behind and scheduler.num_waiting in (0, waited):  # who still waits does so for the end of others
            return
        waited = scheduler.num_waiting
        engine.step(math.inf)
        tick()


def _run(
    engine: Engine, scene: Excerpt, tick: Tick, should_stop: Callable[[], bool]
) -> tuple[dict[str, Any], list[str | None]]:
    """The trace, and the kind of each of its steps (None: the engine had nothing to run in it)."""
    activities = [ProfilerActivity.CPU]
    if engine.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    kinds: list[str | None] = []
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it tells standard error that it starts
    with ranges(engine) as open_range, profile(activities=activities) as profiler:
        for step in range(scene.count):
            for request in scene.joining.get(step, ()):
                engine.add_request(request)
            if not engine.has_work or should_stop():
                break
            with open_range(STEP):
                stats = engine.step(math.inf).stats
            kinds.append(None if stats is None else KINDS[0 if stats.prefill_tokens else 1])
            tick()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text("utf-8", errors="replace"), strict=False)
    return trace, kinds
