"""The step loop on a two-layer model: what it emits, accounts for and survives."""

from __future__ import annotations

import math

import pytest
import torch
from engine_testing import arm_config, build, request, run

from harness.arm import option
from harness.drive import VirtualClock
from impls.models.source import open_model
from impls.request import Request, SamplingParams


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


def engine_for(tiny, *, budget_tokens=512, max_model_len=64, **choices):
    config = arm_config(
        budget_tokens=budget_tokens, source=tiny, max_model_len=max_model_len, **{"model": "tiny", **choices}
    )
    return build(config, tiny, VirtualClock())


def prompts(count, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 500, (length,), generator=generator).tolist() for _ in range(count)]


def stopping_at(token, prompt):
    return Request("r", tuple(prompt), SamplingParams(max_tokens=12, stop_token_ids=(token,), ignore_eos=True))


def test_rows_of_a_static_batch_by_hand(tiny):
    """Prompts of 3 and 5 tokens, outputs of 2 and 4: two padding rows, then the first row is dead for two steps."""
    engine = engine_for(tiny, batching=("static", {"max_num_seqs": 2}), kv_cache="contiguous")
    (a,), (b,) = prompts(1, 3), prompts(1, 5, seed=1)
    outputs, results = run(engine, [request("a", a, 2), request("b", b, 4)])
    assert [len(outputs["a"]), len(outputs["b"])] == [2, 4]
    stats = [r.stats for r in results]
    assert [s.padding_tokens for s in stats] == [2, 0, 0, 0]
    assert [s.dead_rows for s in stats] == [0, 0, 1, 1]
    assert [(s.prefill_tokens, s.decode_tokens) for s in stats] == [(8, 0), (0, 2), (0, 1), (0, 1)]
    assert [s.query_lens for s in stats] == [[5, 5], [1, 1], [1, 1], [1, 1]]
    assert stats[-1].slot_request_ids == ["a", "b"]


def test_reservations_of_a_step_add_up_to_the_capacity(tiny):
    engine = engine_for(tiny, budget_tokens=150)
    _, results = run(engine, [request(f"r{i}", p, 9) for i, p in enumerate(prompts(6, 11))])
    for stats in (r.stats for r in results if r.stats):
        held = sum(hold.reserved for hold in stats.kv_reservations)
        assert held + stats.kv_free_tokens == stats.kv_capacity_tokens == 150
        assert all(hold.used <= hold.reserved for hold in stats.kv_reservations)
        assert stats.kv_allocation_unit == 16


def test_stop_token_ends_the_request_and_is_kept(tiny):
    (prompt,) = prompts(1, 8)
    free = run(engine_for(tiny), [request("r", prompt, 12)])[0]["r"]
    stop = free[5]
    first = free.index(stop)
    engine = engine_for(tiny)
    engine.add_request(stopping_at(stop, prompt))
    emissions = []
    while engine.has_work:
        emissions += engine.step(math.inf).emissions
    assert [t for e in emissions for t in e.token_ids] == free[: first + 1]
    assert emissions[-1].finish_reason == "stop"


def test_drafts_past_a_stop_token_are_cut(tiny):
    """With the target as its own draft everything is accepted; tokens behind the stop must not come out."""
    (prompt,) = prompts(1, 8)
    free = run(engine_for(tiny), [request("r", prompt, 12)])[0]["r"]
    stop = free[6]
    engine = engine_for(
        tiny, decoding="speculative", proposer=("draft_model", {"precision": "fp32"}), budget_tokens=1024
    )
    engine.add_request(stopping_at(stop, prompt))
    tokens, reasons = [], []
    while engine.has_work:
        for emission in engine.step(math.inf).emissions:
            tokens += emission.token_ids
            reasons.append(emission.finish_reason)
    assert tokens == free[: free.index(stop) + 1]
    assert reasons[-1] == "stop"


def test_draft_equal_to_target_is_accepted_whole(tiny):
    """vLLM bug 9730: a hole in the draft's cache behind the bonus token shows as acceptance that collapses."""
    engine = engine_for(
        tiny, decoding="speculative", proposer=("draft_model", {"precision": "fp32"}), budget_tokens=1024
    )
    _, results = run(engine, [request(f"r{i}", p, 24) for i, p in enumerate(prompts(3, 7))])
    drafted = sum(r.stats.draft_tokens for r in results if r.stats)
    assert drafted > 40
    assert sum(r.stats.accepted_tokens for r in results if r.stats) == drafted


@pytest.mark.parametrize("proposer", ["ngram", "layer_skip", ("draft_model", {"precision": "bf16"})])
@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_sampled_tokens_do_not_depend_on_company(tiny, batching, proposer):
    """The same request alone and in a batch, with speculation on: a sample is a function of the request alone."""
    own = prompts(5, 9)
    decoding = {"decoding": "speculative", "proposer": proposer, "batching": batching, "budget_tokens": 2048}
    requests = [request(f"r{i}", p, 10, temperature=0.8, seed=i) for i, p in enumerate(own)]
    together, _ = run(engine_for(tiny, **decoding), requests)
    for each in requests:
        alone, _ = run(engine_for(tiny, **decoding), [each])
        assert alone[each.request_id] == together[each.request_id]


def test_a_request_that_can_never_fit_is_rejected_and_the_others_go_on(tiny):
    """vLLM issue 39734: longer than the whole cache though within max_model_len must not wait for ever."""
    engine = engine_for(tiny, budget_tokens=48, max_model_len=64)
    fits, too_long, beyond = prompts(1, 20)[0], prompts(1, 50)[0], prompts(1, 63)[0]
    for name, prompt in (("long", too_long), ("fits", fits), ("beyond", beyond)):
        engine.add_request(request(name, prompt, 10))
    ended = {}
    while engine.has_work:
        for emission in engine.step(math.inf).emissions:
            if emission.finish_reason:
                ended[emission.request_id] = (emission.finish_reason, emission.error)
    assert ended["fits"] == ("length", None)
    for name in ("long", "beyond"):
        assert ended[name][0] == "rejected" and ended[name][1]


def test_a_request_with_unsound_logits_fails_alone(tiny):
    engine = engine_for(tiny)
    bad, good = prompts(2, 8)
    execute = engine.executor.execute

    def poisoned(batch):
        logits, hidden = execute(batch)
        logits[batch.seq_ids.index("bad")] = float("nan")
        return logits, hidden

    expected = run(engine_for(tiny), [request("good", good, 6)])[0]["good"]
    engine.executor.execute = lambda batch: poisoned(batch) if "bad" in batch.seq_ids else execute(batch)
    ended, tokens = {}, []
    for name, prompt in (("bad", bad), ("good", good)):
        engine.add_request(request(name, prompt, 6))
    while engine.has_work:
        for emission in engine.step(math.inf).emissions:
            if emission.finish_reason:
                ended[emission.request_id] = emission.finish_reason
            if emission.request_id == "good":
                tokens += emission.token_ids
    assert ended == {"bad": "error", "good": "length"}
    assert tokens == expected
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_a_static_row_that_fails_with_drafts_is_a_dead_row(tiny):
    """It recomputes the last position of its tokens, and no draft's."""
    def made():
        return engine_for(
            tiny, batching=("static", {"max_num_seqs": 2}), kv_cache="contiguous", decoding="speculative",
            proposer=("layer_skip", {"num_draft_tokens": 3}),
        )  # fmt: skip

    bad, good = prompts(2, 8)
    expected = run(made(), [request("good", good, 12)])[0]["good"]
    engine = made()
    execute, steps = engine.executor.execute, []

    def poisoned(batch):
        logits, hidden = execute(batch)
        steps.append(batch.query_lens)
        if len(steps) == 2:
            logits[: batch.query_lens[0]] = float("nan")
        return logits, hidden

    engine.executor.execute = poisoned
    outputs, results = run(engine, [request("bad", bad, 12), request("good", good, 12)])
    assert steps[1] == [4, 4] and results[1].stats.drafted.keys() == {"good"}
    assert [e.finish_reason for r in results for e in r.emissions if e.request_id == "bad"][-1] == "error"
    assert outputs["good"] == expected and any(r.stats.dead_rows for r in results)
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_batch_end_holds_back_every_token(tiny):
    engine = engine_for(
        tiny, batching=("static", {"max_num_seqs": 2, "emit": "batch_end"}), kv_cache="contiguous"
    )
    requests = [request(f"r{i}", p, n) for i, (p, n) in enumerate(zip(prompts(2, 6), (2, 5), strict=True))]
    outputs, results = run(engine, requests)
    assert [bool(r.emissions) for r in results] == [False] * 4 + [True]
    assert {name: len(tokens) for name, tokens in outputs.items()} == {"r0": 2, "r1": 5}


def test_tokens_held_back_come_out_when_an_abort_ends_the_batch(tiny):
    engine = engine_for(
        tiny, batching=("static", {"max_num_seqs": 2, "emit": "batch_end"}), kv_cache="contiguous"
    )
    for i, (prompt, tokens) in enumerate(zip(prompts(2, 6), (1, 9), strict=True)):
        engine.add_request(request(f"r{i}", prompt, tokens))
    assert not engine.step(math.inf).emissions
    engine.abort("r1")
    emissions = [e for _ in range(3) if engine.has_work for e in engine.step(engine.clock.now()).emissions]
    assert {e.request_id for e in emissions} >= {"r0"}
    assert not engine.has_work


def test_an_abort_takes_along_what_is_held_back(tiny):
    engine = engine_for(
        tiny, batching=("static", {"max_num_seqs": 2, "emit": "batch_end"}), kv_cache="contiguous"
    )
    for i, (prompt, tokens) in enumerate(zip(prompts(2, 6), (1, 3), strict=True)):
        engine.add_request(request(f"r{i}", prompt, tokens))
    engine.step(math.inf)
    engine.abort("r0")  # it has ended, and nobody has been told
    seen = {e.request_id for _ in range(5) if engine.has_work for e in engine.step(math.inf).emissions}
    assert seen == {"r1"} and not engine.has_work


def test_abort_frees_what_the_request_held(tiny):
    engine = engine_for(tiny)
    for i, prompt in enumerate(prompts(3, 10)):
        engine.add_request(request(f"r{i}", prompt, 20))
    engine.step(math.inf)
    engine.abort("r1")
    engine.kv.check_invariants()
    seen = {e.request_id for _ in range(30) if engine.has_work for e in engine.step(math.inf).emissions}
    assert seen == {"r0", "r2"}
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_unwritten_slots_are_never_read(tiny):
    """NaN in every slot of the cache before the run: the tokens stay what they were."""
    requests = [request(f"r{i}", p, 8) for i, p in enumerate(prompts(4, 13))]
    for attention in ("reference", "sdpa"):
        clean, _ = run(engine_for(tiny, attention=attention), requests)
        engine = engine_for(tiny, attention=attention)
        storage = engine.executor.storage
        for layer in range(tiny.shape.num_layers):
            storage.k(layer).fill_(float("nan"))
            storage.v(layer).fill_(float("nan"))
        poisoned, _ = run(engine, requests)
        assert poisoned == clean


def test_a_step_splits_its_forward_pass_at_attention(tiny, monkeypatch):
    """A clock that moves by a second whenever it is read: two layers, each read before and after."""
    clock = VirtualClock()
    engine = build(arm_config(budget_tokens=512, source=tiny, max_model_len=64, model="tiny"), tiny, clock)
    reads = iter(range(1000))
    monkeypatch.setattr(clock, "now", lambda: float(next(reads)))
    _, results = run(engine, [request("r", prompts(1, 5)[0], 3)])
    assert [(s.attention_s, s.forward_s) for s in (r.stats for r in results)] == [(2.0, 5.0)] * 3
