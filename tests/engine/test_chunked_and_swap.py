"""Chunked prefill and preemption by swapping through the step loop, on a two-layer model."""

from __future__ import annotations

import pytest
import torch
from engine_testing import arm_config, build, request, run

from harness.arm import option
from harness.drive import VirtualClock
from harness.engine_facts import kernels
from impls.models.source import open_model


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


def engine_for(tiny, *, budget_tokens=1024, max_model_len=64, **choices):
    config = arm_config(
        budget_tokens=budget_tokens, source=tiny, max_model_len=max_model_len, **{"model": "tiny", **choices}
    )
    return build(config, tiny, VirtualClock())


def requests(count=5, output=12, **sampling):
    generator = torch.Generator().manual_seed(3)
    lengths = [17, 3, 30, 1, 9][:count]
    return [
        request(f"r{i}", torch.randint(3, 500, (length,), generator=generator).tolist(), output, **sampling)
        for i, length in enumerate(lengths)
    ]


def chunked(budget, **changes):
    return ("chunked_prefill", {"max_num_seqs": 4, "max_num_batched_tokens": budget, **changes})


def test_a_prompt_in_parts_by_hand(tiny):
    """Prompts of 3 and 11 tokens, budget 6: no logits but at a sequence's end, and a last part of one token."""
    engine = engine_for(tiny, batching=chunked(6))
    (a, b) = torch.randint(3, 500, (2, 11), generator=torch.Generator().manual_seed(0)).tolist()
    outputs, results = run(engine, [request("a", a[:3], 3), request("b", b, 2)])
    stats = [r.stats for r in results]
    assert [s.query_lens for s in stats] == [[3, 3], [1, 5], [1, 3], [1]]
    assert [s.kv_lens for s in stats] == [[3, 3], [4, 8], [5, 11], [12]]
    assert [s.num_logits_rows for s in stats] == [1, 1, 2, 1]
    assert [(s.prefill_tokens, s.decode_tokens) for s in stats] == [(6, 0), (5, 1), (3, 1), (0, 1)]
    assert [[e.request_id for e in r.emissions] for r in results] == [["a"], ["a"], ["a", "b"], ["b"]]
    assert [len(outputs["a"]), len(outputs["b"])] == [3, 2]


def test_the_last_part_of_a_prompt_is_prefill_though_it_is_one_token(tiny):
    engine = engine_for(tiny, batching=chunked(4))
    _, results = run(engine, [request("r", list(range(3, 12)), 2)])
    assert [(s.prefill_tokens, s.decode_tokens) for s in (r.stats for r in results)] == [(4, 0), (4, 0), (1, 0), (0, 1)]
    assert [s.num_logits_rows for s in (r.stats for r in results)] == [0, 0, 1, 1]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_step_without_a_row_of_logits_runs_in_every_precision(tiny, precision):
    outputs, results = run(engine_for(tiny, batching=chunked(4), precision=precision), requests())
    assert min(r.stats.num_logits_rows for r in results) == 0
    assert all(len(tokens) == 12 for tokens in outputs.values())


@pytest.mark.parametrize(
    ("proposer", "temperature"),
    [(None, 0.0), (None, 0.8), ("ngram", 0.0), ("layer_skip", 0.0), (("draft_model", {"precision": "fp32"}), 0.0)],
)
def test_budgets_change_no_token(tiny, proposer, temperature):
    """Whatever parts a prompt was computed in. (Sampled, the number of drafts decides which noise is used.)"""
    choices = {} if proposer is None else {"decoding": "speculative", "proposer": proposer}
    traffic = requests(temperature=temperature, seed=5)
    whole, _ = run(engine_for(tiny, batching=("continuous", {"max_num_seqs": 4}), **choices), traffic)
    for budget in (4, 7, 16):
        parts, results = run(engine_for(tiny, batching=chunked(budget), **choices), traffic)
        assert parts == whole
        assert max(sum(r.stats.query_lens) for r in results) <= budget


@pytest.mark.parametrize("batching", ["continuous", "chunked_prefill"])
@pytest.mark.parametrize("proposer", [None, "ngram", "layer_skip", ("draft_model", {"precision": "fp32"})])
def test_swapping_changes_no_token_and_computes_nothing_twice(tiny, batching, proposer):
    choices = {} if proposer is None else {"decoding": "speculative", "proposer": proposer}
    budget = {"max_num_batched_tokens": 64 if batching == "continuous" else 8}
    traffic = requests(output=30)
    ample, _ = run(engine_for(tiny, batching=(batching, {"max_num_seqs": 4, **budget}), **choices), traffic)
    engine = engine_for(
        tiny,
        budget_tokens=88,
        kv_cache=("paged", {"block_size": 4}),
        batching=(batching, {"max_num_seqs": 4, "preemption": "swap", **budget}),
        **choices,
    )
    swapped, results = run(engine, traffic)
    stats = [r.stats for r in results if r.stats]
    assert swapped == ample
    assert sum(s.preempted for s in stats) > 0
    assert sum(s.prefill_tokens for s in stats) == sum(len(r.prompt_token_ids) for r in traffic)
    out, back = sum(s.swapped_out_bytes for s in stats), sum(s.swapped_in_bytes for s in stats)
    one_block = engine.executor.storage.export([0]).nbytes
    if engine.draft_executor is not None:
        one_block += engine.draft_executor.storage.export([0]).nbytes
    assert out == back > 0 and out % one_block == 0
    assert engine.swap.kept_bytes == 0


def test_recomputing_computes_twice_and_copies_nothing(tiny):
    traffic = requests(output=30)
    engine = engine_for(tiny, budget_tokens=112, kv_cache=("paged", {"block_size": 4}))
    _, results = run(engine, traffic)
    stats = [r.stats for r in results if r.stats]
    assert sum(s.preempted for s in stats) > 0
    assert sum(s.prefill_tokens for s in stats) > sum(len(r.prompt_token_ids) for r in traffic)
    assert sum(s.swapped_out_bytes + s.swapped_in_bytes for s in stats) == 0
    assert "swap" not in kernels(engine)


def test_host_memory_is_given_back_by_an_abort_and_the_record_names_the_route(tiny):
    batching = ("continuous", {"max_num_seqs": 4, "preemption": "swap"})
    engine = engine_for(tiny, budget_tokens=112, kv_cache=("paged", {"block_size": 4}), batching=batching)
    for each in requests(output=30):
        engine.add_request(each)
    while not engine.swap.kept_bytes:
        engine.step(0.0)
    assert kernels(engine)["swap"] == "host to host"
    engine.close()
    assert engine.swap.kept_bytes == 0 and engine.kv.num_free_blocks == engine.kv.num_blocks


def test_swap_seconds_are_a_part_of_their_own(tiny, monkeypatch):
    """A clock that moves by a second whenever it is read: a step that copies reads it once more."""
    batching = ("continuous", {"max_num_seqs": 4, "preemption": "swap"})
    engine = engine_for(tiny, budget_tokens=112, kv_cache=("paged", {"block_size": 4}), batching=batching)
    reads = iter(range(10**6))
    monkeypatch.setattr(engine.clock, "now", lambda: float(next(reads)))
    _, results = run(engine, requests(output=30))
    stats = [r.stats for r in results if r.stats]
    assert {s.swap_s for s in stats} == {0.0, 1.0}
    assert all((s.swap_s > 0) == (s.swapped_out_bytes + s.swapped_in_bytes > 0) for s in stats)
