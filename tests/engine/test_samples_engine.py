"""Several samples of one prompt through the step loop, on a two-layer model: one prompt's K/V, independent tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from engine_testing import arm_config, build, option, request, run

from harness.drive import VirtualClock, drive
from harness.recorder import Recorder
from impls.models.source import open_model
from impls.request import Request
from workloads import build_stream

SIZE = 4


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


def engine_of(tiny, blocks=60, **choices):
    """Every slot that nobody has written holds NaN: whoever reads one fails its request."""
    chosen = {"kv_cache": ("paged", {"block_size": SIZE}), "batching": ("continuous", {"max_num_seqs": 8})} | choices
    config = arm_config(budget_tokens=blocks * SIZE, source=tiny, max_model_len=48, model="tiny", **chosen)
    engine = build(config, tiny, VirtualClock())
    for executor in (engine.executor, engine.draft_executor):
        if executor is not None:
            for layer in range(executor.storage.num_layers):
                executor.storage.k(layer).fill_(torch.nan)
                executor.storage.v(layer).fill_(torch.nan)
    return engine


def asked(n: int, length: int = 14, output: int = 8, name: str = "r", **sampling) -> Request:
    prompt = torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return request(name, prompt, output, n=n, **({"temperature": 0.9, "seed": 5} | sampling))


def test_samples_are_named_and_know_their_request():
    one = asked(1)
    assert one.samples() == [one]
    several = asked(3)
    assert [s.request_id for s in several.samples()] == ["r#0", "r#1", "r#2"]
    assert {(s.parent_id, s.sampling.n, s.prompt_token_ids) for s in several.samples()} == {
        ("r", 1, several.prompt_token_ids)
    }
    assert [s.planned_cached_tokens for s in several.samples()] == [0, 13, 13]


SPECULATIVE = {"decoding": "speculative", "proposer": ("draft_model", {"model": "tiny", "precision": "fp32"})}


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"prefix": "radix"},
        {"batching": ("chunked_prefill", {"max_num_seqs": 8, "max_num_batched_tokens": 9})},
        {"blocks": 8},
        {"blocks": 8, "batching": ("continuous", {"max_num_seqs": 8, "preemption": "swap"})},
        {"kv_cache": "contiguous", "blocks": 100},
        {"kv_cache": "exact", "blocks": 120},
        {"batching": ("static", {"max_num_seqs": 8})},
        {**SPECULATIVE, "blocks": 120},
    ],
    ids=str,
)
def test_each_sample_is_what_its_name_alone_would_get(tiny, choices):
    """Whatever it shares and whoever is preempted: the key of its random numbers is its name and nothing else."""
    samples = asked(4).samples()
    together, results = run(engine_of(tiny, **choices), samples)
    assert {e.finish_reason for r in results for e in r.emissions} <= {None, "length"}, "something unwritten was read"
    own = {key: value for key, value in choices.items() if key in SPECULATIVE}
    for sample in samples:
        alone, _ = run(engine_of(tiny, blocks=120, **own), [replace(sample, parent_id=None)])
        assert together[sample.request_id] == alone[sample.request_id]
    assert len({tuple(tokens) for tokens in together.values()}) == 4, "samples are independent"
    if choices.get("blocks") == 8:
        assert sum(r.stats.preempted for r in results if r.stats) > 0


def test_the_prompt_is_computed_once_and_held_once(tiny):
    """Fourteen tokens in blocks of four: three full blocks are held by all, the fourth is copied for three of four."""
    engine = engine_of(tiny)
    held = []
    step = engine.step

    def watched(until):
        result = step(until)
        held.append(engine.kv.num_blocks - engine.kv.num_free_blocks)
        return result

    engine.step = watched
    _, results = run(engine, asked(4).samples())
    stats = [r.stats for r in results]
    assert [s.prefill_tokens for s in stats][:3] == [14, 3, 0], "the others compute the last token, for its logits"
    assert sum(s.copied_blocks for s in stats) == 3
    assert stats[1].cached_prompt_tokens == {f"r#{i}": 13 for i in (1, 2, 3)}
    assert max(held) == 3 + 4 * 2, "and not four times five"
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_greedy_samples_are_all_alike(tiny):
    outputs, _ = run(engine_of(tiny), asked(3, temperature=0.0).samples())
    alone, _ = run(engine_of(tiny), [asked(1, temperature=0.0)])
    assert [outputs[f"r#{i}"] for i in range(3)] == [alone["r"]] * 3


def test_an_aborted_sample_leaves_the_others_their_prompt(tiny):
    engine = engine_of(tiny)
    samples = asked(3).samples()
    for sample in samples:
        engine.add_request(sample)
    engine.step(math.inf)
    engine.step(math.inf)
    engine.abort("r#0")
    engine.kv.check_invariants()
    tokens = {s.request_id: 0 for s in samples}
    while engine.has_work:
        for emission in engine.step(math.inf).emissions:
            tokens[emission.request_id] += len(emission.token_ids)
    assert tokens["r#1"] + 1 >= 8 and tokens["r#2"] + 1 >= 8
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_a_driven_request_is_a_row_for_each_of_its_samples_and_ends_with_the_last(tiny):
    """A closed loop of one: the next request comes when all samples of the one before have ended."""
    workload = {
        "name": "test",
        "num_requests": 3,
        "arrivals": {"name": "closed_loop", "concurrency": 1},
        "prompt_length": {"name": "constant", "value": 10},
        "output_length": {"name": "constant", "value": 4},
        "prompts": {"name": "random"},
        "sampling": {"temperature": 1.0, "ignore_eos": True, "n": 2},
    }
    stream = build_stream(workload, seed=1, tokenizer=None, max_model_len=48, vocab_size=512)
    engine, recorder = engine_of(tiny), Recorder()
    steps = []
    clock = engine.clock

    def on_step(result):
        steps.append(result)
        clock.advance(1.0)

    assert drive(engine, stream, recorder, clock, initial=stream.initial(), on_step=on_step)
    table = recorder.requests()
    assert list(table.request_id) == [f"request-{i}#{k}" for i in range(3) for k in range(2)]
    assert list(table.finish_reason) == ["length"] * 6
    for i in (0, 1):
        ends = table.finished_s[2 * i : 2 * i + 2]
        assert list(table.intended_s[2 * i + 2 : 2 * i + 4]) == [ends.max()] * 2
    assert recorder.steps().copied_blocks.sum() == 3
