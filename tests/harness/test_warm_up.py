"""The warm-up runs every kind of step, leaves nothing behind, and says what decode steps cost by their rows."""

from __future__ import annotations

from typing import Any

import pytest

from harness.arm import resolve_study
from harness.compose import compose_arm
from harness.decode_costs import STEPS
from harness.drive import RealClock
from harness.warm_up import warm_up
from impls.build import build_engine, max_model_len
from impls.engine import Engine
from impls.models.source import open_model
from impls.seams import DecodeCosts, StepStats
from workloads import build_stream
from workloads.stream import RequestStream


def build(*overrides: str) -> tuple[Engine, RequestStream, list[StepStats]]:
    """A tiny engine, its traffic, and the list to which every step that it runs will be added."""
    small = ["kv_cache.budget=8192tokens"] if not any("budget" in o for o in overrides) else []
    arm = compose_arm(["study=none", "model=tiny", "device=cpu", *small, *overrides])
    config = resolve_study({"arm": arm})["arm"]
    source = open_model(config["model"])
    stream = build_stream(
        config["workload"],
        seed=1,
        tokenizer=source.tokenizer,
        max_model_len=max_model_len(config, source),
        vocab_size=source.shape.vocab_size,
    )
    engine = build_engine(config, source, RealClock())
    seen: list[StepStats] = []
    step = engine.step

    def watched(until: float) -> Any:
        result = step(until)
        if result.stats is not None:
            seen.append(result.stats)
        return result

    engine.step = watched  # type: ignore[method-assign]
    return engine, stream, seen


SPECULATIVE = ("decoding=speculative", "proposer=ngram", "proposer.num_draft_tokens=3")


@pytest.mark.parametrize(
    "batching", ["batching=static", "batching=continuous", "batching=static batching.emit=batch_end"]
)
def test_decode_steps_are_timed_by_their_rows(batching: str) -> None:
    engine, stream, seen = build(*batching.split(), "batching.max_num_seqs=4", *SPECULATIVE)
    proposer = engine.proposer
    costs = warm_up(engine, stream).decode_costs
    assert costs is not None
    drafted = [(sequences, sequences * (1 + drafts)) for sequences in (1, 4) for drafts in (0, 1, 2, 3)]
    assert [(cost["sequences"], cost["rows"]) for cost in costs] == drafted
    for cost in costs:
        drafts = cost["rows"] - cost["sequences"]
        kind = [s for s in seen if (s.running, s.draft_tokens, s.prefill_tokens) == (cost["sequences"], drafts, 0)]
        times = sorted(s.forward_s for s in kind)
        assert len(times) >= STEPS and times[0] <= cost["forward_s"] <= times[-1]
    assert engine.proposer is proposer and not engine.has_work
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


@pytest.mark.parametrize("proposer", ["ngram", "layer_skip", "draft_model"])
def test_the_arms_own_proposer_is_timed_and_forgets_what_it_drafted(proposer: str) -> None:
    engine, stream, seen = build("batching.max_num_seqs=4", *SPECULATIVE, f"proposer={proposer}")
    own = engine.proposer
    assert own is not None
    asked: list[tuple[set[int], bool]] = []
    propose = own.propose

    def watched(sequences: Any, k: Any, runner: Any) -> Any:
        asked.append((set(k.values()), engine.proposer is own))
        return propose(sequences, k, runner)

    own.propose = watched  # type: ignore[method-assign]
    costs = warm_up(engine, stream).decode_costs
    assert costs is not None
    for cost in costs:
        kind = [s for s in seen if s.running == cost["sequences"] and not s.prefill_tokens]
        assert cost["propose_s"] is not None and 0 < cost["propose_s"] <= max(s.propose_s for s in kind)
        assert cost["step_s"] >= cost["forward_s"] > 0
    timed = [lengths for lengths, in_place in asked if not in_place]
    assert timed and all(lengths == {3} for lengths in timed)
    kept = getattr(own, "_seen", None) or getattr(own, "_indices", None)
    assert not kept, "a proposer remembers requests of the warm-up"


def test_costs_reach_the_decoder_that_adapts() -> None:
    engine, stream, _ = build("batching.max_num_seqs=2", *SPECULATIVE, "decoding.draft_length=adaptive")
    given: list[DecodeCosts] = []
    engine.decoder.calibrate = given.append  # type: ignore[method-assign]
    costs = warm_up(engine, stream).decode_costs
    assert costs is not None and costs[-1]["propose_s"] is not None
    [known] = given
    assert known.step_s == {cost["rows"]: cost["step_s"] for cost in costs} and set(known.step_s) == {1, 2, 3, 4, 6, 8}
    assert set(known.draft_s) == {1, 2} and known.draft_s[2] == pytest.approx(costs[-1]["propose_s"] / 3)


def test_an_arm_without_drafts_has_no_cost_of_verification() -> None:
    engine, stream, seen = build("batching.max_num_seqs=4")
    assert warm_up(engine, stream).decode_costs is None
    assert any(s.running == 4 and not s.prefill_tokens for s in seen) and not any(s.draft_tokens for s in seen)


def test_where_the_cache_holds_fewer_as_many_are_timed_as_run_together() -> None:
    engine, stream, _ = build(
        *("batching.max_num_seqs=8", "kv_cache=contiguous", "model.max_model_len=64", "kv_cache.budget=192tokens"),
        *("workload/prompt_length=constant", "workload.prompt_length.value=8"),
        *("workload/output_length=constant", "workload.output_length.value=8", *SPECULATIVE),
    )
    costs = warm_up(engine, stream).decode_costs
    assert costs is not None and max(cost["sequences"] for cost in costs) == 3


@pytest.mark.parametrize("decoding", [(), SPECULATIVE])
def test_a_model_of_two_positions_is_warmed_up(decoding: tuple[str, ...]) -> None:
    engine, stream, seen = build(
        *("batching.max_num_seqs=2", "model.max_model_len=2", "workload/prompt_length=constant"),
        *("workload.prompt_length.value=1", "workload/output_length=constant", "workload.output_length.value=1"),
        *decoding,
    )
    warm_up(engine, stream)
    assert seen and not engine.has_work


def test_where_no_full_draft_fits_only_plain_steps_are_timed() -> None:
    engine, stream, _ = build(
        *("batching.max_num_seqs=2", "model.max_model_len=32", "proposer.num_draft_tokens=24"),
        *("workload/prompt_length=constant", "workload.prompt_length.value=8"),
        *("workload/output_length=constant", "workload.output_length.value=8", *SPECULATIVE[:2]),
    )
    costs = warm_up(engine, stream).decode_costs
    assert costs and all(cost["rows"] < 25 * cost["sequences"] for cost in costs)
    assert {cost["rows"] for cost in costs} >= {1, 2, 4} and all(cost["propose_s"] is None for cost in costs)
    assert not engine.has_work


@pytest.mark.parametrize("prefix", ["hash_chain", "radix"])
def test_it_leaves_no_prefix_behind(prefix: str) -> None:
    engine, stream, seen = build("batching.max_num_seqs=4", f"prefix={prefix}", "kv_cache.block_size=2")
    warm_up(engine, stream)
    assert any(hits for s in seen for hits in s.cached_prompt_tokens.values()), "its own prompts come twice"
    for request in stream.warmup_requests(4, prompt_tokens=12, max_tokens=4):
        assert engine.kv.begin(request.request_id, request.prompt_token_ids) == 0


def test_ready_is_when_every_shape_is_made_and_before_what_decoding_costs_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, stream, _ = build("batching.max_num_seqs=4", *SPECULATIVE)
    now = [0.0]
    monkeypatch.setattr("harness.warm_up.process_age_s", lambda: now[0])

    def capture(most: int) -> None:
        now[0] += 5.0

    def timed(*_: Any) -> list[Any]:
        now[0] += 70.0
        return []

    monkeypatch.setattr(engine.executor, "warm_up", capture)
    monkeypatch.setattr("harness.warm_up.decode_costs", timed)
    warmed = warm_up(engine, stream)
    assert (warmed.startup_s, warmed.ready_s, now[0]) == (0.0, 5.0, 75.0)
