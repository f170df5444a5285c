"""`telemetry.profiler=torch` on real trials of the tiny model: the trace, its table, and that nothing else changes."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from direct_study import run_study

from harness.__main__ import main
from harness.arm import resolve_study
from harness.compose import compose_arm
from harness.drive import RealClock, drive
from harness.driven import Driven
from harness.recorder import Recorder
from harness.records import TrialRecord, read_trial
from harness.telemetry import profiler, ranges
from harness.telemetry.options import TelemetryOptions
from harness.telemetry.profiler import Profile, profile_steps
from impls import native
from impls.build import build_engine, max_model_len
from impls.engine import Engine
from impls.execution.compiled import CompiledExecutor
from impls.models import llama
from impls.models.source import open_model
from impls.seams import StepResult
from workloads import build_stream

LAYERS = 2
STEPS = 8
ARM = [
    *("study=none", "model=tiny", "device=cpu", "device.threads=1", "workload/prompts=random"),
    *("workload/arrivals=burst", "workload/prompt_length=uniform", "workload/output_length=uniform"),
    *("workload.output_length.low=3", "workload.output_length.high=14"),
    *("batching.max_num_seqs=3", "model.max_model_len=128", "kv_cache.budget=512tokens"),
    *("batching.max_num_batched_tokens=128", "workload.prompt_length.low=4", "workload.prompt_length.high=40"),
]
TORCH = ["telemetry.profiler=torch", f"telemetry.profiler_steps={STEPS}"]


def trial_of(folder: Path, *arguments: str, requests: int = 9, precision: str = "fp32") -> TrialRecord:
    chosen = [f"workload.num_requests={requests}", f"precision={precision}", "isolation=inline"]
    command = [*ARM, *chosen, *arguments, f"run_dir={folder / 'run'}"]
    assert run_study(command) == 0
    return read_trial(folder / "run/single/0")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> TrialRecord:
    return trial_of(tmp_path_factory.mktemp("profiled"), *TORCH)


def trace_of(record: TrialRecord) -> list[dict[str, Any]]:
    with gzip.open(record.path / "trace.json.gz") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def annotations(record: TrialRecord) -> list[dict[str, Any]]:
    return [event for event in trace_of(record) if event.get("cat") == "user_annotation"]


def inside(events: list[dict[str, Any]], outer: dict[str, Any]) -> list[dict[str, Any]]:
    end = outer["ts"] + outer["dur"]
    return [e for e in events if e is not outer and outer["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end + 1e-3]


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


def test_the_trace_holds_the_steps_with_their_phases_and_layers(profiled: TrialRecord) -> None:
    events = annotations(profiled)
    steps = [event for event in events if event["name"].startswith("step ")]
    assert len(steps) == STEPS
    first = profiled.run["profile"]["first_step"]
    prefill = [tokens > 0 for tokens in profiled.steps["prefill_tokens"][first : first + STEPS]]
    assert any(prefill) and not all(prefill)
    kinds = ["prefill" if seen else "decode" for seen in prefill]
    assert [step["name"] for step in steps] == [f"step {first + i} ({kind})" for i, kind in enumerate(kinds)]
    for step in steps:
        within = inside(events, step)
        phases = [e["name"] for e in within if e["name"] in ("schedule", "prepare", "forward", "sample", "commit")]
        assert phases == ["schedule", "prepare", "forward", "sample", "commit"]
        (forward,) = named(within, "forward")
        layers = [e for e in inside(events, forward) if e["name"].startswith("layer ")]
        assert [layer["name"] for layer in layers] == [f"layer {i}" for i in range(LAYERS)]
        for layer in layers:
            (self_attn,), (mlp,) = (named(inside(events, layer), name) for name in ("self_attn", "mlp"))
            assert self_attn["ts"] + self_attn["dur"] <= mlp["ts"]
            in_attention = Counter(e["name"].partition(":")[0] for e in inside(events, self_attn))
            assert in_attention == {"linear": 2, "kv_write": 1, "attention": 1, "elementwise": 2}  # rotate, norm
            assert Counter(e["name"] for e in inside(events, mlp)) == {
                **{"linear": 2, "elementwise: silu_and_mul": 1, "elementwise: add_rms_norm": 1}
            }


def test_the_table_adds_up_to_the_steps_and_counts_every_call(profiled: TrialRecord) -> None:
    profile = profiled.run["profile"]
    steps = [event for event in annotations(profiled) if event["name"].startswith("step ")]
    assert sum(row["cpu_s"] for row in profile["operators"]) == pytest.approx(1e-6 * sum(e["dur"] for e in steps))
    assert all(row["cpu_s"] >= 0 and row["device_s"] is None for row in profile["operators"])
    for kind in ("prefill", "decode"):
        rows = [row for row in profile["operators"] if row["kind"] == kind]
        n = profile["steps"][kind]
        assert n == sum(f"({kind})" in step["name"] for step in steps) > 0
        calls = {row["group"]: row["calls"] for row in rows if row["phase"] == "forward"}
        calls.pop("host")
        assert calls == {
            **{"linear": n * 4 * LAYERS, "head": n, "attention": n * (LAYERS + 1), "kv_write": n * LAYERS},
            **{"elementwise": n * (2 + 4 * LAYERS), "embedding": n},
        }
        length = sum(step["dur"] for step in steps if f"({kind})" in step["name"])
        claimed = sum(row["cpu_s"] for row in rows if row["phase"])
        assert claimed > 0.5e-6 * length  # what lies between the phases is a few lines of Python
        assert profile["window_s"][kind] > 0


@pytest.mark.skipif(not native.available(), reason="no C compiler: there are no C kernels")
def test_c_kernels_which_the_profiler_cannot_see_are_in_their_groups(tmp_path: Path) -> None:
    """They are called through ctypes: of the forward pass torch itself sees little more than allocations."""
    record = trial_of(tmp_path, *TORCH, "attention=native", precision="bf16", requests=5)
    rows = [row for row in record.run["profile"]["operators"] if row["phase"] == "forward"]
    for group in ("linear", "head", "attention", "elementwise", "embedding"):
        assert sum(row["calls"] for row in rows if row["group"] == group) > 0, group
    if record.run["provenance"]["kernels"]["linear"] == "native_bf16":
        names = {event["name"] for event in trace_of(record)}
        assert not names & {"aten::mm", "aten::addmm", "aten::linear", "aten::matmul"}


@pytest.fixture
def no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str) -> Any:
        raise RuntimeError(f"range {name} entered")

    monkeypatch.setattr(ranges, "record_function", never)


@pytest.mark.usefixtures("no_range")
def test_nothing_measured_changes_and_without_it_there_is_nothing(profiled: TrialRecord, tmp_path: Path) -> None:
    plain = trial_of(tmp_path)
    assert plain.run["status"] == "ok"  # no range is entered while a trial is measured
    assert plain.run["profile"] is None and not list(plain.path.glob("trace*"))
    assert [*plain.requests["output_token_ids"].map(list)] == [*profiled.requests["output_token_ids"].map(list)]
    for name in ("prefill_tokens", "decode_tokens", "running"):
        assert list(plain.steps[name]) == list(profiled.steps[name])
    assert {key: type(value) for key, value in plain.run.items() if key != "profile"} == {
        key: type(value) for key, value in profiled.run.items() if key != "profile"
    }


# --- the pass itself --------------------------------------------------------------------------------------------------


class Watched:
    """An engine of the arm after it has been driven, and what its steps gave, before the profile and in it."""

    def __init__(self, *overrides: str, **execution: Any) -> None:
        arm = compose_arm([*ARM, "workload.num_requests=9", "precision=fp32", *overrides])
        config = resolve_study({"arm": arm})["arm"]
        config["execution"] |= execution
        source = open_model(config["model"])
        length = max_model_len(config, source)
        stream = build_stream(config["workload"], seed=1, tokenizer=None, max_model_len=length, vocab_size=512)
        clock = RealClock()
        self.engine, self.recorder, self.results = build_engine(config, source, clock), Recorder(), list[StepResult]()
        drive(self.engine, stream, self.recorder, clock, initial=stream.initial(), on_step=self.results.append)
        self.seen: list[StepResult] = []

    def profile(self, at: float = 0.5, should_stop: Any = lambda: False) -> Profile:
        step = Engine.step

        def watched(engine: Engine, until: float) -> StepResult:
            self.seen.append(step(engine, until))
            return self.seen[-1]

        options = TelemetryOptions(rate_hz=10.0, profiler="torch", profiler_steps=STEPS, profiler_at=at)
        driven = Driven(self.recorder.sent(), self.recorder.requests(), self.recorder.steps())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "step", watched)
            return profile_steps(self.engine, driven, options, tick=lambda: None, should_stop=should_stop)


@pytest.fixture(scope="module")
def driven() -> Watched:
    return Watched("attention=sdpa")


@pytest.fixture
def watched(driven: Watched) -> Iterator[Watched]:
    """One for all tests: however a profile ends, its engine is left as if there had been none."""
    driven.seen.clear()
    yield driven
    assert not driven.engine.has_work and driven.engine.kv.num_free_blocks == driven.engine.kv.num_blocks


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_the_steps_are_those_of_the_window_again(watched: Watched, at: float) -> None:
    """The same requests, contexts and tokens: each step does what it did, down to the token ids."""
    profile = watched.profile(at)
    assert profile.summary is not None and profile.warnings == ()
    again = watched.seen[-STEPS:]
    first = profile.summary["first_step"]
    before = [result for result in watched.results if result.stats][first : first + STEPS]

    def what(results: list[StepResult]) -> list[Any]:
        stats = [result.stats for result in results if result.stats]
        return [
            *((s.prefill_tokens, s.decode_tokens, s.running, sorted(s.kv_lens)) for s in stats),
            *(sorted((e.request_id, e.token_ids, e.finish_reason) for e in result.emissions) for result in results),
        ]

    assert what(again) == what(before)


def test_every_range_is_taken_off_again(watched: Watched) -> None:
    engine = watched.engine
    parts = [engine, engine.scheduler, engine.executor, engine.executor.attention, engine.executor.model]
    parts += [engine.executor.model.method, llama]
    before = [dict(vars(part)) for part in parts]
    with ranges.ranges(engine):
        assert sum(dict(vars(part)) != seen for part, seen in zip(parts, before, strict=True)) == len(parts)
    for part, seen in zip(parts, before, strict=True):
        assert vars(part).keys() == seen.keys()
        assert all(vars(part)[name] is value for name, value in seen.items() if callable(value))


def test_on_cuda_each_range_is_one_of_nvtx_as_well(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def nvtx_range(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    engine, steps = watched.engine, 0
    with ExitStack() as stack:
        with monkeypatch.context() as patch:  # what is entered is chosen here; the engine itself stays where it is
            patch.setattr(engine, "device", torch.device("cuda"))
            open_range = stack.enter_context(ranges.ranges(engine))
        engine.add_request(watched.recorder.sent()[0])
        while engine.has_work:
            with open_range("step"):
                engine.step(math.inf)
            steps += 1
    engine.close()
    counts = Counter(entered)
    phases = ("step", "schedule", "prepare", "forward", "sample", "commit")
    assert steps > 2 and [counts[name] for name in phases] == [steps] * len(phases)
    assert [counts[f"layer {n}"] for n in range(LAYERS + 1)] == [steps] * LAYERS + [0]
    assert counts["self_attn"] == counts["mlp"] == LAYERS * steps and counts["linear"] > 2 * LAYERS * steps


@pytest.mark.usefixtures("no_range")
def test_a_trial_without_its_profile_is_recorded_with_a_warning(tmp_path: Path) -> None:
    record = trial_of(tmp_path, *TORCH, requests=2)
    assert record.run["status"] == "ok" and record.run["profile"] is None
    assert not list(record.path.glob("trace*"))
    assert "telemetry.profiler=torch: no profile, range step entered" in record.run["validity"]


def test_without_kineto_a_warning_says_so(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "kineto_available", lambda: False)
    profile = watched.profile()
    assert profile.summary is None and profile.trace is None and watched.seen == []
    (warning,) = profile.warnings
    assert "Kineto" in warning and "\n" not in warning


@pytest.mark.parametrize(
    ("part", "error", "said"),
    [
        ("profile", RuntimeError("CUPTI\nrefuses"), "CUPTI refuses"),
        ("profile", MemoryError(), "out of memory"),
        ("profile", OSError(28, "full"), "full"),
        ("operator_table", KeyError("tid"), "'tid'"),
        ("_layers", RuntimeError("CUDA out of memory"), "CUDA out of memory"),
    ],
)
def test_what_goes_wrong_in_it_costs_the_profile_alone(
    watched: Watched, part: str, error: Exception, said: str
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, part, broken)
        profile = watched.profile()
    assert profile.summary is None and profile.trace is None
    (warning,) = profile.warnings
    assert warning.startswith("telemetry.profiler=torch: no profile, ") and said in warning and "\n" not in warning


def test_who_is_stopped_stops_profiling(watched: Watched) -> None:
    profile = watched.profile(should_stop=lambda: len(watched.seen) > 4)
    assert len(watched.seen) <= 6 < STEPS
    assert profile.summary is not None and sum(profile.summary["steps"].values()) <= 5


def test_a_compiled_model_is_told_apart_by_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced without being fused, which takes no compiler: what is in the graph is the same."""
    torch._dynamo.reset()  # after so many graphs of one function, made by tests before, it would run untraced
    monkeypatch.setattr(CompiledExecutor, "validate", classmethod(lambda cls, arm: []))
    found = Watched("attention=sdpa", "execution=compiled", backend="eager")
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    profile = found.profile()
    assert profile.summary is not None and profile.warnings == ()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled  # the ranges made nothing compile anew
    n = sum(profile.summary["steps"].values())
    rows = [row for row in profile.summary["operators"] if row["phase"] == "forward"]
    groups = ("linear", "attention", "head")
    calls = {group: sum(row["calls"] for row in rows if row["group"] == group) for group in groups}
    assert calls == {"linear": n * 4 * LAYERS, "attention": n * (LAYERS + 1), "head": n}
    assert sum(row["cpu_s"] for row in rows if row["group"] == "elementwise") > 0
    assert profile.trace is not None
    events = [e for e in json.loads(gzip.decompress(profile.trace))["traceEvents"] if "dur" in e]
    steps = [event for event in events if event["name"].startswith("step ")]
    assert len(steps) == n
    for step in steps:
        within = inside(events, step)
        assert [e["name"] for e in within if e["name"].startswith("layer ")] == [f"layer {i}" for i in range(LAYERS)]
        for name in ("self_attn", "mlp"):
            parts = named(within, name)
            assert [len(named(inside(events, part), "impls::linear")) for part in parts] == [2] * LAYERS
            attends = [len(named(inside(events, part), "impls::attend")) for part in parts]
            assert attends == [name == "self_attn"] * LAYERS


def test_no_prompt_finds_itself_in_the_prefix_cache() -> None:
    found = Watched("attention=sdpa", "prefix=hash_chain")
    profile = found.profile()
    assert profile.summary is not None
    first = profile.summary["first_step"]
    before = [result.stats for result in found.results if result.stats][first : first + STEPS]
    again = [result.stats for result in found.seen[-STEPS:] if result.stats]
    assert [s.prefill_tokens for s in again] == [s.prefill_tokens for s in before]
    assert max(s.prefill_tokens for s in again) > found.engine.kv.block_size  # whole blocks could have been found


@pytest.mark.parametrize(
    "overrides",
    [
        ["batching=static"],
        ["batching=chunked_prefill"],
        ["decoding=speculative", "proposer=layer_skip"],
        ["execution.overlap=on"],
    ],
)
def test_other_techniques_are_profiled_as_well(overrides: list[str]) -> None:
    found = Watched("attention=sdpa", *overrides)
    profile = found.profile()
    assert profile.summary is not None and profile.warnings == ()
    phases = {row["phase"] for row in profile.summary["operators"] if row["calls"]}
    assert {"schedule", "prepare", "forward", "sample", "commit"} <= phases
    assert ("propose" in phases) == found.engine.decoder.uses_proposer
    if found.engine.decoder.uses_proposer:
        drafting = {row["group"] for row in profile.summary["operators"] if row["phase"] == "propose"}
        assert {"linear", "attention", "kv_write", "head", "drafting"} <= drafting


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("telemetry.profiler=troch", ["telemetry.profiler=troch", "allowed: none, torch", "did you mean torch?"]),
        ("telemetry.profiler=null", ["telemetry.profiler=null", "none, torch"]),
        ("telemetry.profiler_steps=0", ["telemetry.profiler_steps=0", "at least 1", "nearest: 1"]),
        ("telemetry.profiler_steps=1000", ["telemetry.profiler_steps=1000", "at most 256", "nearest: 256"]),
        ("telemetry.profiler_steps=2.5", ["telemetry.profiler_steps=2.5", "a whole number"]),
        ("telemetry.profiler_steps=null", ["telemetry.profiler_steps=null", "a whole number"]),
        ("telemetry.profiler_at=1.5", ["telemetry.profiler_at=1.5", "within 0 and 1", "nearest: 1"]),
        ("telemetry.profiler_at=half", ["telemetry.profiler_at=half", "a number"]),
        ("telemetry.profilr=torch", ["telemetry.profilr", "did you mean telemetry.profiler?"]),
        ("telemetry.rate_hz=null", ["telemetry.rate_hz=null", "a number"]),
    ],
)
def test_its_options_say_what_they_may_be(argument: str, parts: list[str], capsys: Any) -> None:
    assert main([*ARM, argument]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err
