"""`generate` of transformers in static batches: our tokens, a step at a time, in batches of our static policy."""

from __future__ import annotations

import functools
import gc
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from target_runs import FOREIGN, STATIC, Ran, Ticks, build, requests, run

from impls.request import Request, SamplingParams

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS, OUTPUTS = [20, 5, 33, 9, 14, 1], [6, 12, 3, 1, 8, 5]  # two batches: four rows, then two


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def added() -> list[Request]:
    return requests(LENGTHS, OUTPUTS)


@pytest.fixture(scope="module")
def ours(added: list[Request]) -> Ran:
    return run(build(*STATIC), added)


@pytest.fixture(scope="module")
def theirs(added: list[Request]) -> Ran:
    target = build(*STATIC, *FOREIGN)
    ran = run(target, added)
    target.close()
    return ran


def test_greedy_tokens_and_endings_are_the_engines(ours: Ran, theirs: Ran) -> None:
    assert theirs.tokens() == ours.tokens()
    assert theirs.endings() == ours.endings() == {f"r{n}": "length" for n in range(6)}


def test_every_token_comes_with_its_step_and_its_time(ours: Ran, theirs: Ran) -> None:
    steps = [result for result in theirs.results if result.stats is not None]
    assert len(steps) == max(OUTPUTS[:4]) + max(OUTPUTS[4:])
    for result in steps:
        assert {e.request_id for e in result.emissions} == set(result.stats.scheduled)
        assert all(len(e.token_ids) == 1 for e in result.emissions)
        assert len({e.time_s for e in result.emissions}) == 1
        assert result.stats.start_s < result.emissions[0].time_s < result.stats.end_s
    for n, output in enumerate(OUTPUTS):
        times = [e.time_s for e in theirs.of(f"r{n}")]
        assert len(times) == output and sorted(set(times)) == times


def test_steps_are_described_as_the_engines_are(ours: Ran, theirs: Ran) -> None:
    mine = [result.stats for result in ours.results if result.stats]
    other = [result.stats for result in theirs.results if result.stats]
    same = (
        *("prefill_tokens", "decode_tokens", "padding_tokens", "dead_rows", "running", "waiting"),
        *("slot_request_ids", "scheduled", "query_lens", "num_logits_rows", "kv_capacity_tokens"),
    )
    for name in same:
        assert [getattr(s, name) for s in other] == [getattr(s, name) for s in mine], name
    assert other[0].kv_lens == [33] * 4 and other[1].kv_lens == [34] * 4


def test_the_dense_cache_holds_padding_and_ended_rows_and_nothing_ahead(theirs: Ran) -> None:
    stats = [result.stats for result in theirs.results if result.stats]
    for step, cache_len in ((stats[0], 33), (stats[4], 37)):
        held = step.kv_reservations
        assert sum(hold.reserved for hold in held) == 4 * cache_len
        assert sum(hold.used for hold in held if hold.finished) == 0
    used = {hold.request_id: hold.used for hold in stats[4].kv_reservations if not hold.finished}
    assert used == {"r0": 24, "r1": 9, "r2": 0, "r3": 0}  # r2 had three tokens to give, r3 one


def test_a_stop_token_ends_a_row_and_the_end_of_sequence_may_be_ignored(added: list[Request], ours: Ran) -> None:
    tokens = ours.tokens()["r1"]
    stop = tokens[4]
    first = tokens.index(stop)
    (stopped,) = requests([5], [12], stop_token_ids=(stop,))
    prompt = added[1].prompt_token_ids
    asked = [
        Request("stop", prompt, stopped.sampling),
        Request("eos", prompt, SamplingParams(max_tokens=12)),
        Request("ignore", prompt, SamplingParams(max_tokens=12, ignore_eos=True)),
    ]
    target = build(*STATIC, *FOREIGN)
    target._eos_token_ids = frozenset([tokens[2]])
    ran = run(target, asked)
    target.close()
    eos = tokens.index(tokens[2])
    assert ran.tokens() == {"stop": tokens[: first + 1], "eos": tokens[: eos + 1], "ignore": tokens}
    assert ran.endings() == {"stop": "stop", "eos": "stop", "ignore": "length"}


def test_at_batch_end_all_tokens_arrive_when_the_last_row_is_done(added: list[Request], ours: Ran) -> None:
    target = build(*STATIC, *FOREIGN, "batching.emit=batch_end")
    ran = run(target, added)
    target.close()
    assert ran.tokens() == ours.tokens()
    showing = [index for index, result in enumerate(ran.results) if result.emissions]
    assert showing == [max(OUTPUTS[:4]) - 1, len(ran.results) - 1]
    first, second = ({e.time_s for e in ran.results[index].emissions} for index in showing)
    assert len(first) == len(second) == 1 and max(first) < min(second)
    last = ran.results[showing[0]]
    assert last.stats.start_s < min(first) <= last.stats.end_s


def test_an_abort_takes_along_what_is_held_back() -> None:
    target = build(*STATIC, *FOREIGN, "batching.emit=batch_end")
    for each in requests([4, 4], [1, 3]):
        target.add_request(each)
    while target.step(math.inf).stats is None:
        pass
    target.abort("r0")  # it has ended, and nobody has been told
    seen = set()
    while target.has_work:
        seen |= {emission.request_id for emission in target.step(math.inf).emissions}
    target.close()
    assert seen == {"r1"}


def test_a_batch_waits_for_its_timeout_and_what_cannot_run_is_rejected() -> None:
    clock = Ticks()
    target = build(*STATIC[:2], "batching.timeout_s=0.5", *FOREIGN, clock=clock)
    ran = run(target, requests([4, 7, 120], [2, 1, 9]))
    target.close()
    assert ran.endings()["r0"] == ran.endings()["r1"] == "length"
    assert ran.endings()["r2"] == "rejected" and "max_model_len is 128" in ran.of("r2")[0].error
    assert 0.5 <= ran.of("r0")[0].time_s < 0.6


def dense_caches() -> list[Any]:
    """Those that are in memory. Nothing is collected for it: in a measured window nothing is."""
    from transformers.cache_utils import DynamicCache

    return [thing for thing in gc.get_objects() if isinstance(thing, DynamicCache)]


def test_an_aborted_row_leaves_the_others_alone_and_the_cache_goes_with_the_last(
    added: list[Request], ours: Ran
) -> None:
    target = build(*STATIC, *FOREIGN)
    ran = Ran()
    for request in added[:4]:
        target.add_request(request)
    for _ in range(2):
        ran.results.append(target.step(0.0))
    assert dense_caches()
    target.abort("r0")
    ran.results.append(target.step(0.0))
    assert ran.results[-1].stats.dead_rows == 2 and ran.results[-1].stats.running == 2
    assert set(ran.results[-1].stats.scheduled) == {"r1", "r2"}
    target.abort("r1")
    assert target.has_work is False and not dense_caches()  # r2 ended with the third step, r3 with the first
    seen = {"r0": 2, "r1": 3, "r2": 3, "r3": 1}
    assert ran.tokens() == {key: ours.tokens()[key][:count] for key, count in seen.items()}
    again = run(target, added[4:])
    assert again.tokens() == {key: ours.tokens()[key] for key in ("r4", "r5")}
    target.close()


def test_close_in_the_middle_ends_the_thread_and_gives_the_cache_back(added: list[Request]) -> None:
    before = set(threading.enumerate())
    target = build(*STATIC, *FOREIGN)
    for request in added:
        target.add_request(request)
    target.step(0.0)
    assert len(set(threading.enumerate()) - before) == 1 and dense_caches()
    target.close()
    assert set(threading.enumerate()) == before and not dense_caches() and not target.has_work


def test_what_generate_raises_reaches_the_caller_and_close_still_works(
    added: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build(*STATIC, *FOREIGN)
    forward = target._model.forward
    calls = iter(range(100))

    @functools.wraps(forward)  # the library looks at its signature
    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise MemoryError("no room for this step")
        return forward(*arguments, **options)

    monkeypatch.setattr(target._model, "forward", failing)
    with pytest.raises(MemoryError, match="no room for this step"):
        run(target, added)
    target.close()
    assert not target.has_work


def test_sampling_repeats_by_seed_and_greedy_rows_beside_it_stay_greedy(added: list[Request], ours: Ran) -> None:
    def sampled(seed: int) -> Ran:
        warm = requests(LENGTHS[:3], OUTPUTS[:3], temperature=0.9, top_k=20, top_p=0.95, seed=seed)
        target = build(*STATIC, *FOREIGN)
        ran = run(target, [added[0], *warm[1:]])
        target.close()
        return ran

    first, again, other = sampled(1), sampled(1), sampled(2)
    assert first.tokens() == again.tokens() != other.tokens()
    assert first.tokens()["r0"] == ours.tokens()["r0"]
    assert first.tokens()["r1"] != ours.tokens()["r1"]


def test_top_k_and_top_p_cut_each_row_as_it_asks() -> None:
    from impls.targets.row_sampling import RowSampling

    scores = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]])).expand(4, -1)
    rows = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=0.5),
    ]
    left = RowSampling(rows)(torch.zeros(4, 1, dtype=torch.long), scores).softmax(-1)
    assert [int((row > 0).sum()) for row in left] == [1, 3, 2, 4]
    squared = torch.tensor([0.25, 0.0625, 0.0225, 0.01])
    assert torch.allclose(left[3], squared / squared.sum())
