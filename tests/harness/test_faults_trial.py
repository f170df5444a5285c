"""Faults that other benchmark tools had around the measured window, by their numbers in the reference list.

Two real trials of the tiny model in this process: one watched, one whose model breaks down in the window.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from direct_study import run_study
from test_metrics_faults import requests_of, row

import harness.observe
import harness.system.engine
from harness.arm import resolve_study
from harness.compose import compose_arm
from harness.drive import RealClock, drive
from harness.records import TrialRecord, read_trial
from harness.trial_record import judge, unnatural_prompts
from harness.warm_up import warm_up
from impls.build import build_engine, max_model_len
from impls.engine import Engine
from impls.models.source import open_model
from impls.seams import StepLimits
from workloads import build_stream
from workloads.stream import RequestStream

SEQUENCES = 3
LEAD_S = 10 * harness.observe.LEAD_S  # here, where other tests may keep the sampler's thread waiting
ARM = [
    *("study=none", "model=tiny", "device=cpu", "device.threads=1", "attention=sdpa", "workload/prompts=random"),
    *("workload/arrivals=burst", "workload/prompt_length=uniform", "workload/output_length=constant"),
    *("workload.output_length.value=12", "workload.num_requests=8", f"batching.max_num_seqs={SEQUENCES}"),
    *("model.max_model_len=128", "kv_cache.budget=512tokens", "batching.max_num_batched_tokens=128"),
    *("workload.prompt_length.low=4", "workload.prompt_length.high=40"),
]


def trial_of(folder: Path, *arguments: str) -> tuple[int, TrialRecord]:
    """Exit status and record of a command of one arm and one trial, run in this process."""
    given = {argument.partition("=")[0] for argument in arguments}
    arm = [option for option in ARM if option.partition("=")[0] not in given]
    command = [*arm, *arguments, "isolation=inline", f"run_dir={folder / 'run'}"]
    return run_study(command), read_trial(folder / "run/single/0")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    seen: dict[str, Any] = {"order": []}
    folder = tmp_path_factory.mktemp("trial")

    def watched_warm_up(engine: Engine, stream: RequestStream, tick: Any) -> Any:
        capture = engine.executor.warm_up

        def watched_capture(limits: StepLimits) -> None:
            seen["order"].append(f"shapes up to {limits.max_num_seqs}")
            capture(limits)

        engine.executor.warm_up = watched_capture  # type: ignore[method-assign]
        warmed = warm_up(engine, stream, tick)
        seen["order"].append("warmed up")
        return warmed

    def watched_drive(engine: Engine, *arguments: Any, **options: Any) -> bool:
        seen["order"].append("window")
        seen["collects"], seen["frozen"] = gc.isenabled(), gc.get_freeze_count()
        before = [generation["collections"] for generation in gc.get_stats()]
        completed = drive(engine, *arguments, **options)
        seen["collections"] = [g["collections"] - b for g, b in zip(gc.get_stats(), before, strict=True)]
        return completed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.observe, "LEAD_S", LEAD_S)
        patch.setattr(harness.system.engine, "warm_up", watched_warm_up)
        patch.setattr(harness.observe, "drive", watched_drive)
        seen["status"], seen["record"] = trial_of(folder)
    yield seen


def test_15_no_garbage_collection_in_the_window_and_again_after_it(watched: dict[str, Any]) -> None:
    assert watched["status"] == 0
    assert watched["collects"] is False and watched["frozen"] > 10_000
    assert watched["collections"] == [0, 0, 0]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_47_every_shape_has_run_before_the_window_opens(watched: dict[str, Any]) -> None:
    assert watched["order"] == [f"shapes up to {SEQUENCES}", "warmed up", "window"]


def test_32_and_38_telemetry_and_steps_are_on_one_clock_that_starts_at_the_window(watched: dict[str, Any]) -> None:
    record = watched["record"]
    sampled, window = record.telemetry["t_s"], record.run["window"]
    assert -LEAD_S <= sampled.min() < 0 <= record.steps["start_s"].min()  # no sample of the warm-up
    assert record.steps["end_s"].max() <= sampled.max() < record.steps["end_s"].max() + 5  # none since the epoch
    assert 0 <= window["start_s"] < window["end_s"] <= sampled.max()


def test_a_sequence_gains_one_token_a_step_without_drafts(watched: dict[str, Any]) -> None:
    record = watched["record"]
    assert record.run["metrics"]["tokens_per_step"] == 1.0
    assert record.steps["emitted_tokens"].sum() == record.requests["output_tokens"].sum() == 8 * 12


def test_28_output_is_as_long_as_was_asked_where_the_end_of_sequence_is_ignored() -> None:
    """Every token of the vocabulary ends a sequence here."""
    for ignored, tokens, reason in ((True, 12, "length"), (False, 1, "stop")):
        engine, stream = engine_and_traffic(f"workload.sampling.ignore_eos={ignored}")
        engine.eos_token_ids = frozenset(range(512))
        for request in stream.initial():
            engine.add_request(request)
        made: dict[str, int] = {}
        while engine.has_work:
            for emission in engine.step(math.inf).emissions:
                made[emission.request_id] = made.get(emission.request_id, 0) + len(emission.token_ids)
                assert emission.finish_reason in (None, reason)
        assert set(made.values()) == {tokens} and len(made) == 8


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_18_and_19_the_warm_up_keeps_the_arms_limits_and_leaves_nothing_behind(batching: str) -> None:
    engine, stream = engine_and_traffic(f"batching={batching}")
    step, running = engine.step, list[int]()

    def watched_step(until: float) -> Any:
        result = step(until)
        running.append(0 if result.stats is None else result.stats.running)
        return result

    engine.step = watched_step  # type: ignore[method-assign]
    warm_up(engine, stream)
    assert max(running) == SEQUENCES  # full, and not beyond
    assert not engine.has_work and engine.kv.num_free_blocks == engine.kv.num_blocks


def test_f5_and_45_a_trial_whose_requests_fail_is_failed_and_so_is_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_drive(engine: Engine, *arguments: Any, **options: Any) -> bool:
        execute = engine.executor.execute

        def unsound(batch: Any) -> Any:
            logits, hidden = execute(batch)
            return logits.fill_(float("nan")), hidden

        engine.executor.execute = unsound  # type: ignore[method-assign]
        return drive(engine, *arguments, **options)

    monkeypatch.setattr(harness.observe, "drive", broken_drive)
    status, record = trial_of(tmp_path)
    assert status == 1 and record.run["status"] == "failed"
    why = "of 8 requests 0 finished, 8 failed, 0 were rejected: the model's logits are not finite"
    assert record.run["reasons"] == [why]
    metrics = record.run["metrics"]
    assert metrics["ttft_s"]["mean"] is None and metrics["ttft_s"]["p50"] == math.inf
    assert metrics["output_tokens_per_s"] is None
    assert (record.requests["finish_reason"] == "error").all() and record.requests["error"].notna().all()


FINISHED, REJECTED = row(0.0, [1.0], [1]), row(0.0, [], [], "rejected", error="longer than max_model_len")
FAILED = {
    "error": row(0.0, [1.0], [1], "error", error="the model's\nlogits are not finite"),
    "truncated": row(0.0, [1.0], [1], "truncated"),
    "an empty reply": row(0.0, [], [], "stop"),
}


@pytest.mark.parametrize("kind", FAILED)
@pytest.mark.parametrize("survivors", [0, 1, 99])
def test_29_and_45_survivors_of_a_failing_trial_do_not_speak_for_it(survivors: int, kind: str) -> None:
    """They had the machine to themselves for as long as the failed one should have run."""
    status, (reason,) = judge(requests_of(FAILED[kind], *[FINISHED] * survivors, REJECTED))
    assert status == "failed"
    assert reason.startswith(f"of {survivors + 2} requests {survivors} finished, 1 failed, 1 were rejected")
    assert reason.endswith("rejected: the model's logits are not finite") == (kind == "error")


def test_45_a_trial_that_served_nobody_is_failed() -> None:
    assert judge(requests_of(REJECTED, REJECTED)) == (
        "failed",
        ["of 2 requests 0 finished, 0 failed, 2 were rejected: longer than max_model_len"],
    )
    for requests in ([], [FINISHED], [FINISHED, REJECTED]):
        assert judge(requests_of(*requests)) == ("ok", [])


def test_44_speculation_on_random_tokens_is_flagged() -> None:
    speculation = ("study=none", "model=smollm2_135m", "decoding=speculative")
    random = compose_arm([*speculation, "workload/prompts=random"])["workload"]
    prefixed = compose_arm([*speculation, "workload/prompts=five_shot"])["workload"]
    natural = compose_arm([*speculation, "workload=summarize"])["workload"]
    assert [unnatural_prompts(w) != [] for w in (random, prefixed, natural)] == [True, True, False]


def test_44_a_trial_says_so_in_its_record(tmp_path: Path) -> None:
    _, record = trial_of(tmp_path, "decoding=speculative", "workload.sampling.ignore_eos=true")
    warnings = [w.partition(":")[0] for w in record.run["validity"]]
    assert "unnatural prompts" in warnings and "repetitive output" in warnings
    emitted, rows = (int(record.steps[name].sum()) for name in ("emitted_tokens", "kept_rows"))
    assert emitted == record.requests["output_tokens"].sum() and record.steps["accepted_tokens"].sum() > 0
    assert record.run["metrics"]["tokens_per_step"] == emitted / rows > 1


def test_a_full_swap_space_is_told(tmp_path: Path) -> None:
    """With no room at all, everyone that is preempted computes again what it had."""
    swap = ("batching.preemption=swap", "batching.max_swapped_tokens=0", "kv_cache.budget=80tokens")
    _, record = trial_of(tmp_path, *swap, "workload.output_length.value=40")
    preempted, kept = (int(record.steps[name].sum()) for name in ("preempted", "swapped_out"))
    assert preempted > kept == 0 == record.steps["swap_kept_bytes"].max()
    what = f"swap space full: {preempted} of {preempted} preempted sequences"
    assert [w for w in record.run["validity"] if w.startswith(what)]


def engine_and_traffic(*overrides: str) -> tuple[Engine, RequestStream]:
    config = resolve_study({"arm": compose_arm([*ARM, *overrides])})["arm"]
    source = open_model(config["model"])
    stream = build_stream(
        config["workload"], seed=1, tokenizer=None, max_model_len=max_model_len(config, source), vocab_size=512
    )
    return build_engine(config, source, RealClock()), stream
