"""The warm-up runs every kind of step, leaves nothing behind, and says what a step of verification costs."""

from __future__ import annotations

from typing import Any

import pytest

from harness.arm import resolve_study
from harness.compose import compose_arm
from harness.drive import RealClock
from harness.warm_up import VERIFY_STEPS, warm_up
from impls.build import build_engine, max_model_len
from impls.engine import Engine
from impls.models.source import open_model
from impls.seams import StepStats
from workloads import build_stream
from workloads.stream import RequestStream


def build(*overrides: str) -> tuple[Engine, RequestStream, list[StepStats]]:
    """A tiny engine, its traffic, and the list to which every step that it runs will be added."""
    config = resolve_study({"arm": compose_arm(["study=none", "model=tiny", "device=cpu", *overrides])})["arm"]
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


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_a_full_batch_decodes_plainly_and_verifies_full_drafts(batching: str) -> None:
    engine, stream, seen = build(f"batching={batching}", "batching.max_num_seqs=4", *SPECULATIVE)
    proposer = engine.proposer
    warmed = warm_up(engine, stream)
    assert warmed.verify_cost is not None
    assert (warmed.verify_cost["rows"], warmed.verify_cost["sequences"]) == (4, 4)
    full = [s for s in seen if s.running == 4 and not s.prefill_tokens]
    assert sum(s.draft_tokens == 12 for s in full) >= VERIFY_STEPS
    assert sum(s.draft_tokens == 0 for s in full) >= VERIFY_STEPS
    verified = sorted(s.forward_s for s in full if s.draft_tokens == 12)
    assert verified[0] <= warmed.verify_cost["step_s"]["verify"] <= verified[-1]
    assert engine.proposer is proposer and not engine.has_work
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_an_arm_without_drafts_has_no_cost_of_verification() -> None:
    engine, stream, seen = build("batching.max_num_seqs=4")
    assert warm_up(engine, stream).verify_cost is None
    assert any(s.running == 4 and not s.prefill_tokens for s in seen) and not any(s.draft_tokens for s in seen)


def test_where_the_cache_holds_fewer_the_cost_is_that_of_as_many_as_run_together() -> None:
    engine, stream, _ = build(
        *("batching.max_num_seqs=8", "kv_cache=contiguous", "model.max_model_len=64", "kv_cache.budget=192tokens"),
        *("workload/prompt_length=constant", "workload.prompt_length.value=8"),
        *("workload/output_length=constant", "workload.output_length.value=8", *SPECULATIVE),
    )
    cost = warm_up(engine, stream).verify_cost
    assert cost is not None and cost["sequences"] == 3


def test_where_no_full_draft_fits_there_is_no_cost() -> None:
    engine, stream, _ = build(
        *("batching.max_num_seqs=2", "model.max_model_len=32", "proposer.num_draft_tokens=24"),
        *("workload/prompt_length=constant", "workload.prompt_length.value=8"),
        *("workload/output_length=constant", "workload.output_length.value=8", *SPECULATIVE[:2]),
    )
    assert warm_up(engine, stream).verify_cost is None
    assert not engine.has_work
