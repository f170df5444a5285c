"""A whole run with its counts, what recording costs of it, and writing the record."""

from __future__ import annotations

import gc
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from conftest import best_seconds
from engine_testing import arm_config, build
from simulated_run import LADDER, burst, run_record
from simulated_run import Engine as ScriptedEngine

from harness.drive import RealClock, drive
from harness.limits import StepCost
from harness.recorder import Recorder
from harness.records import read_trial, write_trial
from impls.models.source import open_model
from impls.seams import StepResult
from workloads import build_stream

REQUESTS, PROMPT, OUTPUT, BLOCK = 32, 24, 40, 16
# A small part of the smallest real model's work: recording is dearest where steps are short.
SMALL_SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 4, "head_dim": 64, "vocab_size": 4096}


class TimedRecorder(Recorder):
    """Knows how long it was busy while the run lasted, in CPU time of the thread."""

    busy_s = 0.0

    def step(self, result: StepResult) -> None:
        begun = time.thread_time()
        super().step(result)
        self.busy_s += time.thread_time() - begun


def test_whole_run_and_the_share_of_recording(benchmark: Any, project_conf: Any) -> None:
    model = project_conf("model", "tiny")
    model["shape"] |= SMALL_SHAPE
    source = open_model(model)
    config = arm_config(
        budget_tokens=8192,
        source=source,
        max_model_len=256,
        model=("tiny", {"shape": model["shape"]}),
        batching=("continuous", {"max_num_seqs": REQUESTS}),
    )
    workload = {
        "name": "burst",
        "num_requests": REQUESTS,
        "arrivals": {"name": "burst"},
        "prompt_length": {"name": "constant", "value": PROMPT},
        "output_length": {"name": "constant", "value": OUTPUT},
        "prompts": {"name": "random"},
        "sampling": {"ignore_eos": True},
    }
    stream = build_stream(workload, seed=0, tokenizer=None, max_model_len=256, vocab_size=4096)
    shares: list[float] = []
    recorders: list[Recorder] = []

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        clock = RealClock()
        engine = build(config, source, clock)
        gc.collect()
        return (engine, TimedRecorder(), clock, stream.initial()), {}

    def run(engine: Any, recorder: TimedRecorder, clock: RealClock, initial: Any) -> None:
        begun = time.thread_time()  # of this thread: what the other ones compute makes the share no smaller
        assert drive(engine, stream, recorder, clock, initial=initial)
        shares.append(recorder.busy_s / (time.thread_time() - begun))
        recorders.append(recorder)

    benchmark.pedantic(run, setup=fresh, rounds=3)
    steps, requests = recorders[-1].steps(), recorders[-1].requests()
    assert len(steps) == OUTPUT
    assert steps["prefill_tokens"].sum() == REQUESTS * PROMPT
    assert steps["decode_tokens"].sum() == REQUESTS * (OUTPUT - 1)
    assert list(requests["output_tokens"]) == [OUTPUT] * REQUESTS
    held = steps["kv_used_tokens"] + steps["kv_reserved_ahead_tokens"] + steps["kv_internal_tokens"]
    blocks = REQUESTS * -(-(PROMPT + OUTPUT - 1) // BLOCK)
    assert int(held.max()) == blocks * BLOCK
    assert min(shares) < 0.01, "recording takes less than 1 % of a run"
    benchmark.extra_info.update(
        steps=len(steps), tokens=REQUESTS * OUTPUT, blocks=blocks, recording_percent=100 * min(shares)
    )


def test_recording_a_step(benchmark: Any) -> None:
    """While the run lasts: the steps of 400 requests on 32 rows, scripted, with drafts."""
    engine = ScriptedEngine(LADDER[3], np.random.default_rng(0), 1.0, burst(0, 400))
    requests, results = list(engine.waiting), []
    while engine.waiting or engine.live:
        results.append(engine.step())

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        recorder = Recorder()
        for request in requests:
            recorder.submitted(request, 0.0)
        return (recorder,), {}

    def record(recorder: Recorder) -> Recorder:
        for result in results:
            recorder.step(result)
        return recorder

    recorder = benchmark.pedantic(record, setup=fresh, rounds=5)
    assert len(recorder.steps()) == len(results)
    benchmark.extra_info.update(steps=len(results))
    best = best_seconds(benchmark)
    if best is not None:
        benchmark.extra_info.update(us_per_step=1e6 * best / len(results))


def test_writing_a_record(benchmark: Any, tmp_path: Path) -> None:
    """When the run is over: tables built, written, and read back as they were."""
    engine, recorder = ScriptedEngine(LADDER[3], np.random.default_rng(0), 1.0, burst(0, 400)), Recorder()
    for request in engine.waiting:
        recorder.submitted(request, 0.0)
    while engine.waiting or engine.live:
        recorder.step(engine.step())
    run, numbers = run_record("bench", LADDER[3], 0, 400), count()

    def write() -> Path:
        folder = tmp_path / str(next(numbers))
        write_trial(folder, run, recorder.requests(), recorder.steps(lambda stats: StepCost(1e9, 1e8)))
        return folder

    folder = benchmark.pedantic(write, rounds=3)
    record = read_trial(folder)
    tokens = int(record.requests["output_tokens"].sum())
    assert len(record.requests) == 400
    assert tokens == sum(request.sampling.max_tokens for request in burst(0, 400))
    size = sum(path.stat().st_size for path in folder.iterdir())
    benchmark.extra_info.update(steps=len(record.steps), tokens=tokens, bytes=size)
