"""execution.overlap: the same tokens, whatever was in flight when a sequence grew, yielded, ended or was given up."""

from __future__ import annotations

import math
import time

import hypothesis
import pytest
import torch
from engine_testing import arm_config, build
from hypothesis import strategies as st

import impls.build
from harness.arm import option
from harness.metrics import compute_metrics
from harness.recorder import Recorder
from harness.records import TELEMETRY_COLUMNS, TELEMETRY_SCHEMA, frame
from impls.models.source import open_model
from impls.request import Request, SamplingParams
from impls.seams import StepLimits
from impls.topology.disaggregated import Disaggregated

SIZE, ROWS, MAX_MODEL_LEN = 4, 5, 64
STOPS = tuple(range(3, 512, 12))  # so many that most requests with them end by one, and none knows when
TIGHT = {"budget_tokens": 80}
SWAP = {"max_num_seqs": ROWS, "preemption": "swap"}
CHUNKS = {"max_num_seqs": ROWS, "max_num_batched_tokens": 7}
ARMS = {
    "continuous": {},
    "chunked": {"batching": ("chunked_prefill", CHUNKS)},
    "recompute": TIGHT,
    "swap": TIGHT | {"batching": ("continuous", SWAP)},
    "swap_limited": TIGHT | {"batching": ("continuous", SWAP | {"max_swapped_tokens": 20})},
    "chunked_swap": TIGHT | {"batching": ("chunked_prefill", CHUNKS | SWAP)},
    "hash_chain": TIGHT | {"prefix": "hash_chain"},
    "radix": TIGHT | {"prefix": "radix", "batching": ("chunked_prefill", {"max_num_seqs": ROWS})},
    "contiguous": {"kv_cache": "contiguous", "budget_tokens": 3 * MAX_MODEL_LEN},
    "pow2": {"kv_cache": "pow2", "budget_tokens": 3 * MAX_MODEL_LEN},
    "priority": TIGHT | {"batching": ("continuous", {"max_num_seqs": ROWS, "order": "priority"})},
}


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


def engine_for(tiny, overlap, *, budget_tokens=512, **choices):
    defaults = {"kv_cache": ("paged", {"block_size": SIZE}), "batching": ("continuous", {"max_num_seqs": ROWS})}
    choices = {"model": "tiny", "execution": ("eager", {"overlap": overlap})} | defaults | choices
    config = arm_config(budget_tokens=budget_tokens, source=tiny, max_model_len=MAX_MODEL_LEN, **choices)
    return build(config, tiny)


def slowed(engine, seconds=0.0005):
    """As a device that is never done before the host comes back with the next step."""
    execute = engine.executor.execute

    def late(batch):
        time.sleep(seconds)
        return execute(batch)

    engine.executor.execute = late
    return engine


def traffic(seed, count=12):
    """(after how many steps, request): prompts that share their starts, some in two samples, greedy and sampled, ending
    by length or by a stop token."""
    draw = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=draw))

    starts = [torch.randint(3, 500, (12,), generator=draw).tolist() for _ in range(2)]
    found = []
    for i in range(count):
        prompt = starts[i % 2][: integer(1, 13)] + torch.randint(3, 500, (integer(1, 12),), generator=draw).tolist()
        sampled = {"temperature": 0.9, "seed": i, "top_k": 40 * (i % 4), "top_p": 0.9} if i % 3 else {}
        sampling = SamplingParams(
            max_tokens=integer(1, 20),
            ignore_eos=True,
            stop_token_ids=STOPS if i % 2 else (),
            n=2 if i % 5 == 4 else 1,
            **sampled,
        )
        due = integer(0, 12)
        found += [(due, each) for each in Request(f"r{i}", tuple(prompt), sampling, priority=i % 3).samples()]
    return sorted(found, key=lambda each: each[0])


def serve(engine, arrivals, aborts=None):
    """Step by step; an arrival or an abort is due after so many steps. Emissions by request, and all steps."""
    arrivals, aborts = list(arrivals), dict(aborts or {})
    given, results, turn = {}, [], 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= turn:
            engine.add_request(arrivals.pop(0)[1])
        for request_id in [name for name, due in aborts.items() if due == turn]:
            engine.abort(request_id)
        turn += 1
        assert turn < 2000
        if not engine.has_work:
            continue
        result = engine.step(0.0)
        results.append(result)
        engine.kv.check_invariants()
        for emission in result.emissions:
            given.setdefault(emission.request_id, []).append(emission)
    engine.close()
    assert engine.kv.num_free_blocks == engine.kv.num_blocks and engine.swap.kept_bytes == 0
    return given, results


def tokens_of(given):
    return {name: [t for e in emissions for t in e.token_ids] for name, emissions in given.items()}


def ends_of(given):
    return {name: [e.finish_reason for e in emissions if e.finish_reason] for name, emissions in given.items()}


def stats_of(results):
    return [result.stats for result in results if result.stats]


@pytest.mark.parametrize("name", ARMS)
def test_overlap_changes_no_token(tiny, name):
    arrivals = traffic(0)
    expected, _ = serve(engine_for(tiny, "off", **ARMS[name]), arrivals)
    given, results = serve(slowed(engine_for(tiny, "on", **ARMS[name])), arrivals)
    assert tokens_of(given) == tokens_of(expected)
    assert ends_of(given) == ends_of(expected) and all(len(ends) == 1 for ends in ends_of(given).values())
    stats = stats_of(results)
    assert sum(sum(s.query_lens) for s in stats) == sum(s.prefill_tokens + s.decode_tokens + s.dead_rows for s in stats)
    assert all(s.running == len(s.scheduled) for s in stats)
    by_stop = sum(ends == ["stop"] for ends in ends_of(given).values())
    assert 0 < sum(s.dead_rows for s in stats) <= by_stop, "only a stop token is found a step late"
    grows = "kv_cache" not in ARMS[name]
    assert (sum(s.preempted for s in stats) > 0) == (grows and "budget_tokens" in ARMS[name])
    assert (sum(s.copied_blocks for s in stats) > 0) == (name != "pow2"), "samples begin as copies of each other"


@hypothesis.settings(max_examples=6)
@hypothesis.given(data=st.data())
def test_whatever_happens_overlap_changes_no_token(tiny, data):
    seed = data.draw(st.integers(0, 10**6), "traffic")
    batching = {"max_num_seqs": data.draw(st.integers(1, 6), "rows")}
    policy = data.draw(st.sampled_from(["continuous", "chunked_prefill"]), "policy")
    if policy == "chunked_prefill":
        batching["max_num_batched_tokens"] = data.draw(st.integers(batching["max_num_seqs"], 20), "tokens")
    batching["preemption"] = data.draw(st.sampled_from(["recompute", "swap"]), "preemption")
    batching["order"] = data.draw(st.sampled_from(["fcfs", "shortest_first", "priority"]), "order")
    choices = {
        "batching": (policy, batching),
        "kv_cache": ("paged", {"block_size": data.draw(st.sampled_from([1, 3, 4, 16]), "block size")}),
        "prefix": data.draw(st.sampled_from(["off", "hash_chain", "radix"]), "prefix"),
        "budget_tokens": data.draw(st.sampled_from([64, 80, 160, 512]), "budget"),
    }
    arrivals = traffic(seed, count=8)
    names = [request.request_id for _, request in arrivals]
    aborts = data.draw(st.dictionaries(st.sampled_from(names), st.integers(1, 25), max_size=3), "aborts")
    whole, _ = serve(engine_for(tiny, "off", **choices), arrivals)
    given, _ = serve(slowed(engine_for(tiny, "on", **choices), 0.0002), arrivals, aborts)
    wanted = tokens_of(whole)
    for name in names:
        tokens = tokens_of(given).get(name, [])
        assert tokens == (wanted[name][: len(tokens)] if name in aborts else wanted[name])
        assert name in aborts or ends_of(given)[name] == ends_of(whole)[name]


def test_a_compiled_model_runs_in_the_thread_too_and_is_not_compiled_anew(tiny):
    torch._dynamo.reset()  # after so many graphs of one function, made by tests before, it would run untraced
    arrivals = traffic(0, count=5)
    expected, _ = serve(engine_for(tiny, "off"), arrivals)
    engine = engine_for(tiny, "on", execution=("compiled", {"overlap": "on", "backend": "aot_eager"}))
    engine.executor.warm_up(StepLimits(ROWS, ROWS, 64))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    given, results = serve(engine, arrivals)
    assert tokens_of(given) == tokens_of(expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0
    assert max(len(s.query_lens) for s in stats_of(results)) > 1


@pytest.mark.parametrize("name", ["continuous", "chunked", "swap", "radix"])
def test_aborts_at_any_time_disturb_nobody(tiny, name):
    arrivals = traffic(7)
    names = [request.request_id for _, request in arrivals]
    expected, _ = serve(engine_for(tiny, "off", **ARMS[name]), arrivals)
    aborts = {each: 4 + i for i, each in enumerate(names) if i % 2 == 0}
    given, _ = serve(slowed(engine_for(tiny, "on", **ARMS[name])), arrivals, aborts)
    for each, complete in tokens_of(expected).items():
        tokens = tokens_of(given).get(each, [])
        assert tokens == (complete[: len(tokens)] if each in aborts else complete)


def test_an_aborted_id_may_come_again_at_once(tiny):
    """What is in flight under that name is the other's."""
    first = Request("r", (5, 6, 7), SamplingParams(max_tokens=9, ignore_eos=True))
    second = Request("r", (9, 8), SamplingParams(max_tokens=6, ignore_eos=True))
    expected, _ = serve(engine_for(tiny, "off"), [(0, second)])
    engine = slowed(engine_for(tiny, "on"))
    engine.add_request(first)
    engine.step(math.inf)
    engine.abort("r")
    given, _ = serve(engine, [(0, second)])
    assert tokens_of(given) == tokens_of(expected)


def test_the_next_step_is_launched_before_the_one_before_it_is_resolved(tiny):
    engine = engine_for(tiny, "on")
    engine.add_request(Request("r", (5, 6, 7), SamplingParams(max_tokens=6, ignore_eos=True)))
    launched, launch = [], engine.runner.launch
    engine.runner.launch = lambda *a: launched.append(len(results)) or launch(*a)
    results = []
    while engine.has_work:
        results.append(engine.step(math.inf))
    engine.close()
    assert launched == [0, 0, 1, 2, 3, 4], "two at first, then one while the one before it is in flight"
    assert [len(r.emissions) for r in results] == [1] * 6, "its length is known beforehand: no row is wasted"
    assert sum(s.dead_rows for s in stats_of(results)) == 0


def test_the_end_of_sequence_is_found_a_step_late_and_that_row_is_dead(tiny):
    request = Request("r", (5, 6, 7), SamplingParams(max_tokens=12))
    engine = engine_for(tiny, "off")
    engine.eos_token_ids = frozenset()
    tokens = tokens_of(serve(engine, [(0, request)])[0])["r"]
    engine = engine_for(tiny, "on")
    engine.eos_token_ids = frozenset(tokens[4:5])
    cut = tokens[: tokens.index(tokens[4]) + 1]
    given, results = serve(engine, [(0, request)])
    assert tokens_of(given)["r"] == cut and ends_of(given)["r"] == ["stop"]
    stats = stats_of(results)
    assert [(s.running, s.decode_tokens, s.dead_rows) for s in stats] == [
        *((1, int(i > 0), 0) for i in range(len(cut))),
        (0, 0, 1),
    ]
    assert [s.scheduled for s in stats][-1] == [] and stats[-1].kv_reservations[0].finished
    assert [sum(s.query_lens) for s in stats] == [3] + [1] * len(cut)


def test_whoever_is_about_to_end_makes_room_before_anybody_yields(tiny):
    """Eight blocks of four. When b outgrows what it holds a is at its last token: its blocks are free a step later."""
    sampling = {"ignore_eos": True}
    a = Request("a", tuple(range(3, 18)), SamplingParams(max_tokens=2, **sampling))  # 15 + 1 positions: 4 blocks
    b = Request("b", tuple(range(30, 45)), SamplingParams(max_tokens=6, **sampling))
    for overlap in ("off", "on"):
        _, results = serve(engine_for(tiny, overlap, budget_tokens=32), [(0, a), (0, b)])
        assert sum(s.preempted for s in stats_of(results)) == 0
        assert sum(sum(s.query_lens) for s in stats_of(results)) == 16 + 20, "nothing is computed twice"


@pytest.mark.parametrize("name", ["swap", "continuous"])
def test_the_host_does_not_touch_the_cache_while_a_step_runs(tiny, name):
    """Blocks are copied out, in and to others only when all that was launched is done."""
    engine = slowed(engine_for(tiny, "on", **ARMS[name]), 0.003)
    running, copies, execute = [], [], engine.executor.execute

    def watched(batch):
        running.append(1)
        try:
            return execute(batch)
        finally:
            running.pop()

    engine.executor.execute = watched
    for method in ("swap_out", "swap_in", "copy"):
        own = getattr(engine.swap, method)
        setattr(engine.swap, method, lambda *a, own=own: copies.append(len(running)) or own(*a))
    serve(engine, traffic(0))
    assert copies and not any(copies)


def test_a_request_that_can_never_run_is_told_so_while_others_run(tiny):
    good = Request("good", (4, 5, 6), SamplingParams(max_tokens=8, ignore_eos=True))
    long = Request("long", tuple(range(3, 60)), SamplingParams(max_tokens=20))
    given, _ = serve(engine_for(tiny, "on"), [(0, good), (2, long)])
    assert ends_of(given) == {"good": ["length"], "long": ["rejected"]}
    assert len(tokens_of(given)["good"]) == 8


def test_steps_follow_one_another_and_emissions_lie_in_their_own(tiny):
    _, results = serve(slowed(engine_for(tiny, "on")), traffic(1))
    ends = 0.0
    for result in results:
        if (stats := result.stats) is None:
            continue
        assert ends <= stats.start_s < stats.end_s
        assert all(stats.start_s <= e.time_s <= stats.end_s for e in result.emissions if e.token_ids)
        assert stats.attention_s <= stats.forward_s and stats.forward_s > 0.0005
        ends = stats.end_s
    busy = sum(s.forward_s + s.sample_s for s in stats_of(results))
    assert busy <= ends, "no step ran beside another"


def test_a_record_of_overlapped_steps_keeps_its_definitions(tiny):
    engine, recorder = engine_for(tiny, "on", **ARMS["hash_chain"]), Recorder()
    for _, request in traffic(3):
        recorder.submitted(request, 0.0)
        engine.add_request(request)
    while engine.has_work:
        recorder.step(engine.step(math.inf))
    engine.close()
    requests, steps = recorder.requests(), recorder.steps()
    telemetry = frame({name: [] for name in TELEMETRY_COLUMNS}, TELEMETRY_SCHEMA)
    _, metrics, _ = compute_metrics(requests, steps, telemetry, window_rule="burst", kv_layout="paged")
    assert metrics["tokens_per_step"] == 1.0, "a token that was computed for nothing was not kept"
    assert int(steps["kept_rows"].sum()) == int(requests["output_tokens"].sum())
    assert (steps["kept_rows"] <= steps["running"]).all() and int(steps["dead_rows"].sum()) > 0
    parts = steps[["kv_used_tokens", "kv_reserved_ahead_tokens", "kv_internal_tokens"]]
    assert (parts >= 0).all(axis=None) and (parts.sum(axis=1) <= steps["kv_capacity_tokens"]).all()
    assert (requests["scheduled_s"] <= requests["first_token_s"]).all()


def test_a_request_with_unsound_logits_fails_alone(tiny):
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    bad, good = Request("bad", (9, 8, 7), sampling), Request("good", (4, 5, 6), sampling)
    expected, _ = serve(engine_for(tiny, "off"), [(0, good)])
    engine = engine_for(tiny, "on")
    execute, seen = engine.executor.execute, []

    def poisoned(batch):
        logits, hidden = execute(batch)
        if "bad" in batch.seq_ids:
            seen.append(batch)
            if len(seen) == 2:
                logits[batch.seq_ids.index("bad")] = float("nan")
        return logits, hidden

    engine.executor.execute = poisoned
    given, _ = serve(engine, [(0, bad), (0, good)])
    assert ends_of(given) == {"bad": ["error"], "good": ["length"]}
    assert tokens_of(given)["good"] == tokens_of(expected)["good"]
    assert len(tokens_of(given)["bad"]) == 1 and len(seen) == 3, "once too often, as its end was not foreseen"


def test_what_a_step_raises_ends_the_run(tiny):
    engine = engine_for(tiny, "on")
    engine.add_request(Request("r", (5, 6, 7), SamplingParams(max_tokens=6)))
    engine.executor.execute = lambda batch: (_ for _ in ()).throw(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step(math.inf)
    engine.close()
    assert not engine.has_work


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"batching": "static"}, "batching=continuous or chunked_prefill"),
        ({"decoding": "speculative"}, "decoding=autoregressive"),
        ({"execution": ("eager", {"overlap": "maybe"})}, "execution.overlap=maybe: must be on or off"),
        ({"execution": ("eager", {"overlap": False})}, "execution.overlap=False: must be on or off"),
        ({}, None),
    ],
)
def test_what_does_not_overlap_says_why(tiny, choices, said):
    choices = {"model": "tiny", "execution": ("eager", {"overlap": "on"})} | choices
    config = arm_config(budget_tokens=512, source=tiny, max_model_len=MAX_MODEL_LEN, **choices)
    reasons = impls.build.validate_axes(impls.build.describe_arm(config, tiny))
    assert [said in reason for reason in reasons] == ([] if said is None else [True]), reasons


def test_a_worker_that_takes_sequences_in_does_not_overlap(tiny):
    config = arm_config(budget_tokens=512, source=tiny, max_model_len=MAX_MODEL_LEN, model="tiny")
    arm = impls.build.describe_arm(config | {"topology": option("topology", "disaggregated")}, tiny)
    assert Disaggregated.validate(arm) == []
    arm.axes["execution"]["overlap"] = "on"
    (reason,) = Disaggregated.validate(arm)
    assert "execution.overlap=on" in reason
