"""Prefix reuse in a running engine: hits are counted, never change a token, and nothing unwritten is ever read."""

from __future__ import annotations

import math

import pytest
import torch
from engine_testing import arm_config, build, option, request, run

import impls.engine
from harness.metrics import compute_metrics
from harness.recorder import Recorder
from harness.records import TELEMETRY_COLUMNS, TELEMETRY_SCHEMA, frame
from impls.engine import Engine
from impls.models.source import open_model
from impls.request import Request

INDEXES = ["hash_chain", "radix"]
LENGTH = 96
SIZE = 4


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


def engine_of(tiny, prefix: str, blocks: int = 60, **choices) -> Engine:
    """Every slot that nobody has written holds NaN: whoever reads one fails its request."""
    config = arm_config(
        budget_tokens=blocks * SIZE,
        source=tiny,
        max_model_len=LENGTH,
        **{
            "model": "tiny",
            "prefix": prefix,
            "kv_cache": ("paged", {"block_size": SIZE}),
            "batching": ("continuous", {"max_num_seqs": 4}),
        }
        | choices,
    )
    engine = build(config, tiny)
    poison(engine, range(engine.kv.num_blocks))
    return engine


def poison(engine: Engine, blocks) -> None:
    for executor in (engine.executor, engine.draft_executor):
        if executor is not None:
            for layer in range(executor.storage.num_layers):
                executor.storage.k(layer)[list(blocks)] = torch.nan
                executor.storage.v(layer)[list(blocks)] = torch.nan


def run_poisoned(engine: Engine, requests: list[Request]) -> tuple[dict[str, list[int]], list]:
    """As `run`, with NaN in every block that is free after a step, which is what its last tenant left there."""
    step = engine.step

    def poisoning(until: float):
        result = step(until)
        poison(engine, engine.kv._free)
        return result

    engine.step = poisoning
    outputs, results = run(engine, requests)
    engine.step = step
    endings = {emission.finish_reason for result in results for emission in result.emissions}
    assert endings <= {None, "length"}, "something unwritten was read"
    return outputs, results


def cached(results: list) -> dict[str, int]:
    return {key: n for r in results if r.stats for key, n in r.stats.cached_prompt_tokens.items()}


def traffic(seed: int = 3, count: int = 10) -> list[Request]:
    """Two shared starts, of which one is a start of the other, and what is each request's own."""
    rng = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> list[int]:
        return torch.randint(5, 200, (n,), generator=rng).tolist()

    common = tokens(21)
    return [request(f"r{i}", common[: (9, 21)[i % 2]] + tokens(1 + i % 5), 12) for i in range(count)]


@pytest.fixture(scope="module")
def expected(tiny):
    outputs, _ = run(engine_of(tiny, "off", attention="reference"), traffic())
    return outputs


@pytest.mark.parametrize("prefix", INDEXES)
@pytest.mark.parametrize("batching", ["continuous", "chunked_prefill"])
@pytest.mark.parametrize("proposer", [None, "ngram", "layer_skip", "draft_model"])
@pytest.mark.parametrize("blocks", [60, 13])
def test_reuse_changes_no_token(tiny, expected, prefix, batching, proposer, blocks):
    """With ample memory, and with so little that sequences are preempted and what is cached is evicted."""
    decoding = {} if proposer is None else {"decoding": "speculative", "proposer": (proposer, {})}
    if proposer == "draft_model":
        decoding["proposer"] = ("draft_model", {"model": "tiny", "precision": "fp32"})
    limits = {"max_num_seqs": 4, **({"max_num_batched_tokens": 16} if batching == "chunked_prefill" else {})}
    engine = engine_of(tiny, prefix, blocks, batching=(batching, limits), **decoding)
    outputs, results = run_poisoned(engine, traffic())
    assert outputs == expected
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
    assert sum(cached(results).values()) > 0
    if blocks == 13:
        assert sum(r.stats.preempted for r in results if r.stats) > 0
    if proposer is not None:
        assert sum(r.stats.draft_tokens for r in results if r.stats) > 0


@pytest.mark.parametrize("prefix", INDEXES)
@pytest.mark.parametrize("proposer", [None, "draft_model"])
def test_swapping_what_is_shared_changes_no_token(tiny, expected, prefix, proposer):
    decoding = {} if proposer is None else {"decoding": "speculative", "proposer": (proposer, {"precision": "fp32"})}
    batching = ("continuous", {"max_num_seqs": 4, "preemption": "swap"})
    engine = engine_of(tiny, prefix, 13, batching=batching, **decoding)
    outputs, results = run_poisoned(engine, traffic())
    assert outputs == expected
    assert sum(r.stats.swapped_in_bytes for r in results if r.stats) > 0 == engine.swap.kept_bytes


@pytest.mark.parametrize("attention", ["reference", "sdpa", "native"])
def test_every_cpu_kernel_reads_shared_blocks(tiny, expected, attention):
    if attention == "native":
        from impls import native

        if why := native.why_unavailable():
            pytest.skip(why)
    outputs, _ = run_poisoned(engine_of(tiny, "radix", attention=attention), traffic())
    assert outputs == expected


@pytest.mark.parametrize("prefix", INDEXES)
def test_equal_prompts_in_one_step_do_not_read_each_other(tiny, prefix):
    """vllm#41838, and mini-sglang#142 for their second copies."""
    prompt = traffic()[0].prompt_token_ids
    twins = [request("a", prompt, 12), request("b", prompt, 12)]
    alone, _ = run(engine_of(tiny, "off"), twins[:1])
    outputs, results = run_poisoned(engine_of(tiny, prefix), twins)
    assert outputs["a"] == outputs["b"] == alone["a"]
    assert cached(results) == {"a": 0, "b": 0}


@pytest.mark.parametrize("prefix", INDEXES)
@pytest.mark.parametrize("length", [SIZE, 2 * SIZE, 2 * SIZE + 1, 3 * SIZE - 1])
def test_a_prompt_known_whole_computes_at_least_its_last_token(tiny, prefix, length):
    """nano-vllm#144: at a multiple of the block size nothing was left to compute."""
    prompt = list(range(10, 10 + length))
    engine = engine_of(tiny, prefix)
    first, _ = run_poisoned(engine, [request("a", prompt, 8)])
    second, results = run_poisoned(engine, [request("b", prompt, 8)])
    assert second["b"] == first["a"]
    assert cached(results) == {"b": (length - 1) // SIZE * SIZE}
    assert results[0].stats.query_lens == [length - (length - 1) // SIZE * SIZE]


@pytest.mark.parametrize("prefix", INDEXES)
def test_recomputing_its_own_tokens_is_no_hit(tiny, prefix):
    """vllm#25780: random prompts, 30 % hit rate, all of them of preempted requests that found their own blocks."""
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 200, (12,), generator=rng).tolist() for _ in range(4)]
    engine = engine_of(tiny, prefix, blocks=13)
    outputs, results = run_poisoned(engine, [request(f"r{i}", p, 16) for i, p in enumerate(prompts)])
    assert sum(r.stats.preempted for r in results if r.stats) > 0
    assert cached(results) == {f"r{i}": 0 for i in range(4)}
    alone, _ = run(engine_of(tiny, "off"), [request(f"r{i}", p, 16) for i, p in enumerate(prompts)])
    assert outputs == alone
    computed = sum(sum(r.stats.query_lens) for r in results if r.stats)
    engine = engine_of(tiny, "off", blocks=13)
    _, results = run(engine, [request(f"r{i}", p, 16) for i, p in enumerate(prompts)])
    assert computed < sum(sum(r.stats.query_lens) for r in results if r.stats), "but it saves the work"


def test_logits_that_are_not_finite_leave_nothing_behind_for_others(tiny):
    engine = engine_of(tiny, "hash_chain")
    prompt = list(range(10, 30))
    expected, _ = run(engine, [request("before", prompt, 8)])
    poison(engine, engine.kv._cached)  # the keys and values of the prompt go bad
    _, results = run(engine, [request("bad", prompt, 8)])
    (error,) = [e for r in results for e in r.emissions if e.finish_reason == "error"]
    assert error.request_id == "bad"
    after, results = run_poisoned(engine, [request("after", prompt, 8)])
    assert after["after"] == expected["before"] and cached(results) == {"after": 0}


@pytest.mark.parametrize("prefix", ["off", *INDEXES])
def test_what_is_recorded(tiny, prefix, monkeypatch):
    requests = traffic()
    engine, recorder = engine_of(tiny, prefix), Recorder()
    for each in requests:
        engine.add_request(each)
        recorder.submitted(each, 0.0)
    held, prepare = [], impls.engine.prepare

    def watched(*args):
        held.append(SIZE * (engine.kv.num_blocks - engine.kv.num_free_blocks))
        return prepare(*args)

    monkeypatch.setattr(impls.engine, "prepare", watched)
    while engine.has_work:
        recorder.step(engine.step(math.inf))
    table, steps = recorder.requests(), recorder.steps()
    observed = int(table["cached_prompt_tokens"].sum())
    computed = int(steps["query_rows"].sum())
    written = sum(len(r.prompt_token_ids) + 11 for r in requests)
    assert computed == written - observed, "what was found was not computed, all else was"
    assert (observed > 0) is (prefix != "off")
    telemetry = frame({name: [] for name in TELEMETRY_COLUMNS}, TELEMETRY_SCHEMA)
    _, metrics, _ = compute_metrics(table, steps, telemetry, window_rule="burst", kv_layout="paged")
    assert metrics["prefix_hit_rate_observed"] == observed / sum(len(r.prompt_token_ids) for r in requests)
    parts = steps["kv_used_tokens"] + steps["kv_reserved_ahead_tokens"] + steps["kv_internal_tokens"]
    assert list(parts) == held, "a block that several hold is there once"
