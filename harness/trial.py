"""One arm, one trial: build, warm up, drive, record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from harness.drive import RealClock
from harness.observe import examine, observe
from harness.provenance import provenance
from harness.records import SCHEMA_VERSION, rewrite_run, write_trial
from harness.system.kinds import system_under_test
from harness.telemetry.host import host_load
from harness.telemetry.options import TelemetryOptions
from harness.trial_record import examined, record_of
from impls.build import build_target, construct, max_model_len
from impls.models.source import open_model
from impls.seams import StepResult
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
    samples: int = 1  # of each request
    ended: int = 0  # of them all

    def count(self, result: StepResult) -> None:
        """One call of the target's `step`: a step, or a wait in which nothing came."""
        ran = result.stats is not None or bool(result.emissions)
        self.steps += ran
        self.waits += not ran
        self.output_tokens += sum(len(e.token_ids) for e in result.emissions)
        self.ended += sum(e.finish_reason is not None for e in result.emissions)
        self.finished = self.ended // self.samples


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
    failed. Errors propagate. What goes wrong after the window leaves a whole record that is `NOT_EXAMINED`.

    ``isolated``: this process runs nothing else, so that its start-up time and peak memory are the trial's.
    """
    progress = Progress()
    on_progress(progress)
    if config["device"].get("threads"):
        torch.set_num_threads(int(config["device"]["threads"]))
    source = open_model(config["model"])
    begun = time.monotonic()
    load_before = host_load()
    stream = build_stream(
        config["workload"],
        seed=seed,
        tokenizer=source.tokenizer,
        max_model_len=max_model_len(config, source),
        vocab_size=source.shape.vocab_size,
    )
    own_s = time.monotonic() - begun  # no part of what the arm takes to start
    options: TelemetryOptions = construct(config["telemetry"])
    clock = RealClock()
    target = build_target(config, source, clock)
    opened.callback(target.close)
    system = system_under_test(target, config, source)

    def tick() -> None:
        progress.waits += 1
        on_progress(progress)

    def on_step(result: StepResult) -> None:
        progress.count(result)
        on_progress(progress)

    progress.phase = "warming up"
    warmed = system.warm_up(stream, tick).less(own_s)
    roof = system.peaks()
    described = provenance(str(config["device"]["name"]), dict(system.kernels))
    described["model"] = {"name": source.name, "fingerprint": source.fingerprint}
    initial = stream.initial()
    progress.phase, progress.requests = "measuring", stream.num_requests
    progress.samples = max((request.sampling.n for request in initial), default=1)
    seen = observe(system, stream, initial, clock, options, on_step=on_step, should_stop=should_stop)
    described |= system.other_hosts()
    described |= {"host_before": load_before, "host_after": host_load(), "workload": stream.provenance}
    progress.phase = "finishing"
    on_progress(progress)
    run = {
        "schema_version": SCHEMA_VERSION,
        "study": study,
        "arm": arm,
        "trial": trial,
        "seed": seed,
        **record_of(system, stream, described, warmed, roof, seen, isolated=isolated),
    }
    write_trial(out_dir, run, seen.requests, seen.steps, seen.telemetry)
    after = examine(system, seen, options, first=trial == 0, tick=tick, should_stop=should_stop)
    rewrite_run(out_dir, examined(run, after), after.profile.trace)
    return str(run["status"])
