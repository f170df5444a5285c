"""Continuous batching of transformers: our tokens, one at a time, by a thread that ends with the target."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
from target_runs import CONTINUOUS, FOREIGN, STATIC, Ran, build, requests, run

from harness.drive import RealClock
from impls.request import Request, SamplingParams

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS, OUTPUTS = [20, 5, 33, 9, 14, 1], [6, 12, 3, 1, 8, 5]


@pytest.fixture(scope="module")
def added() -> list[Request]:
    return requests(LENGTHS, OUTPUTS)


@pytest.fixture(scope="module")
def ours(added: list[Request]) -> Ran:
    return run(build(*CONTINUOUS), added)


def opened(*overrides: str) -> Any:
    return build(*CONTINUOUS, *FOREIGN, *overrides, clock=RealClock())


@pytest.mark.parametrize(
    "how", [(), ("batching=chunked_prefill", "batching.max_num_batched_tokens=8"), ("kv_cache.block_size=64",)], ids=str
)
def test_greedy_tokens_and_endings_are_the_engines(how: tuple[str, ...], added: list[Request], ours: Ran) -> None:
    target = opened(*how)
    ran = run(target, added)
    target.close()
    assert ran.tokens() == ours.tokens()
    assert ran.endings() == {f"r{n}": "length" for n in range(6)}
    assert all(len(e.token_ids) == 1 for e in ran.emissions) and all(r.stats is None for r in ran.results)
    for n, output in enumerate(OUTPUTS):
        times = [e.time_s for e in ran.of(f"r{n}")]
        assert len(times) == output and times == sorted(times)


def test_its_limits_are_the_arms(added: list[Request]) -> None:
    target = opened("batching.max_num_seqs=2", "batching.max_num_batched_tokens=160", "kv_cache.block_size=32")
    run(target, added[:1])
    processor = target._manager.batch_processor
    assert (processor.scheduler.max_requests_per_batch, processor.max_batch_tokens) == (2, 160)
    assert (processor.cache.num_blocks, processor.cache.use_prefix_sharing) == (32, False)
    target.close()


def test_no_more_than_its_slots_run_at_once(added: list[Request]) -> None:
    target = opened("batching.max_num_seqs=2")
    most = 0
    for request in added:
        target.add_request(request)
    while target.has_work:
        target.step(target._clock.now() + 60)
        most = max(most, len(target._manager.batch_processor.scheduler.active_requests))
    target.close()
    assert most == 2


def test_prefix_reuse_changes_no_token(added: list[Request]) -> None:
    shared = [Request(f"s{n}", (*added[2].prompt_token_ids[:32], n), added[1].sampling) for n in range(3)]
    alone = run(build(*CONTINUOUS), shared).tokens()
    target = opened("prefix=hash_chain")
    ran = Ran()
    for request in shared:
        ran.results += run(target, [request]).results
    assert target._manager.batch_processor.cache.use_prefix_sharing
    target.close()
    assert ran.tokens() == alone


def test_stops_ends_of_sequence_and_rejections(added: list[Request], ours: Ran) -> None:
    tokens = ours.tokens()["r1"]
    prompt = added[1].prompt_token_ids
    target = opened()
    target._eos_token_ids = frozenset([tokens[2]])
    ran = run(
        target,
        [
            Request("stop", prompt, SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(tokens[4],))),
            Request("eos", prompt, SamplingParams(max_tokens=12)),
            Request("ignore", prompt, SamplingParams(max_tokens=12, ignore_eos=True)),
            Request("long", prompt, SamplingParams(max_tokens=124)),
            Request("several", prompt, SamplingParams(max_tokens=2, n=2)),
            Request("drawn", prompt, SamplingParams(max_tokens=2, temperature=0.5)),
        ],
    )
    target.close()
    found = ran.tokens()
    until = {"stop": tokens.index(tokens[4]) + 1, "eos": tokens.index(tokens[2]) + 1, "ignore": 12}
    assert {key: found.pop(key) for key in until} == {key: tokens[:count] for key, count in until.items()}
    assert found == {"long": [], "several": [], "drawn": []}
    endings = ran.endings()
    assert (endings.pop("stop"), endings.pop("eos"), endings.pop("ignore")) == ("stop", "stop", "length")
    assert endings == dict.fromkeys(("long", "several", "drawn"), "rejected")
    assert "max_model_len is 128" in ran.of("long")[0].error and "only one sample" in ran.of("several")[0].error
    assert "decodes all requests alike, here by temperature 0.0" in ran.of("drawn")[0].error


def test_sampled_requests_are_sampled(added: list[Request], ours: Ran) -> None:
    target = opened()
    asked = requests(LENGTHS[:3], OUTPUTS[:3], temperature=1.5, top_k=50, top_p=0.95)
    ran = run(target, asked)
    target.close()
    assert {key: len(tokens) for key, tokens in ran.tokens().items()} == {"r0": 6, "r1": 12, "r2": 3}
    assert ran.tokens()["r1"] != ours.tokens()["r1"]


def test_a_step_waits_no_longer_than_it_may_and_an_idle_target_has_no_work() -> None:
    clock = RealClock()
    target = build(*CONTINUOUS, *FOREIGN, clock=clock)
    assert not target.has_work
    start = clock.now()
    assert target.step(start + 0.05).emissions == [] and 0.05 <= clock.now() - start < 1.0
    target.close()


def test_aborted_requests_are_forgotten_and_their_ids_may_come_again(added: list[Request], ours: Ran) -> None:
    target = opened()
    for request in added[:2]:
        target.add_request(request)
    while not target.step(target._clock.now() + 60).emissions:
        pass
    target.abort("r1")
    target.abort("r1")
    ran = run(target, [added[1]])
    assert ran.tokens()["r1"] == ours.tokens()["r1"]
    assert not target._manager.batch_processor.has_pending_requests()
    assert target._manager.batch_processor.cache.compute_free_capacity() == 1.0
    target.close()


def test_close_in_the_middle_ends_its_thread(added: list[Request]) -> None:
    before = set(threading.enumerate())
    target = opened()
    for request in added:
        target.add_request(request)
    assert len(set(threading.enumerate()) - before) == 1
    target.close()
    assert set(threading.enumerate()) == before and not target.has_work


def test_an_error_in_its_thread_fails_the_requests_and_then_the_target(
    added: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = opened()

    @functools.wraps(target._model.forward)  # the library looks at its signature
    def failing(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("no room\nfor this step")

    monkeypatch.setattr(target._model, "forward", failing)
    ran = run(target, added[:1])
    assert ran.endings() == {"r0": "error"} and ran.of("r0")[0].error == "no room for this step"
    with pytest.raises(RuntimeError, match="has stopped: no room"):
        target.add_request(added[2])
    target.close()


def test_static_and_continuous_batches_agree_with_each_other(added: list[Request]) -> None:
    static, continuous = build(*STATIC, *FOREIGN), opened()
    assert run(static, added).tokens() == run(continuous, added).tokens()
    static.close()
    continuous.close()
