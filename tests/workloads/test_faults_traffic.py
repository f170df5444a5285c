"""Faults that other benchmark tools had in their traffic, by their numbers in the reference list (docs/measurement.md).

At the level of the whole stream, as a trial asks for it; the laws themselves are tested beside this file.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy import stats

from workloads import build_stream
from workloads.stream import RequestStream

Make = Callable[..., RequestStream]
PROSE = {"name": "prose", "law": "natural", "style": "prose"}
SUMMARIES = {"name": "summarize", "law": "natural", "style": "summarize"}


@pytest.fixture(scope="module")
def make(words: Any, plain: Callable[..., dict[str, Any]]) -> Make:
    def get(seed: int = 0, **changes: Any) -> RequestStream:
        return build_stream(plain(**changes), seed=seed, tokenizer=words, max_model_len=10**6)

    return get


def gaps(stream: RequestStream) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.diff([request.arrival_s for request in stream.initial()])


def test_f7_constant_is_constant_and_poisson_is_poisson_at_any_rate_and_follows_the_seed(make: Make) -> None:
    short = {"num_requests": 2000, "prompt_length": {"name": "constant", "value": 1}}
    even = gaps(make(arrivals={"name": "constant", "rate": 7.0}, **short))
    assert even.std() / even.mean() < 1e-9
    for rate in (0.5, 50.0):
        poisson = {"name": "poisson", "rate": rate}
        drawn = gaps(make(arrivals=poisson, **short))
        assert drawn.std() / drawn.mean() == pytest.approx(1.0, abs=0.06)
        assert stats.kstest(drawn, "expon", args=(0, 1 / rate)).pvalue > 0.01
        whole_seconds = np.abs((drawn.cumsum() + 0.5) % 1.0 - 0.5) < 0.001
        assert whole_seconds.mean() < 0.01  # not binned by the second
    assert (gaps(make(arrivals=poisson, **short)) == drawn).all()
    assert (gaps(make(seed=1, arrivals=poisson, **short)) != drawn).all()


@pytest.mark.parametrize("prompts", [{"name": "random"}, PROSE, SUMMARIES], ids=lambda prompts: str(prompts["name"]))
def test_16_another_trial_has_other_prompts(make: Make, prompts: dict[str, Any]) -> None:
    """A second run with the first one's prompts would measure a warm prefix cache."""
    constant = {"name": "constant", "value": 40}
    one, other = (
        {request.prompt_token_ids for request in make(seed=seed, prompts=prompts, prompt_length=constant).initial()}
        for seed in (1, 2)
    )
    assert len(one) == len(other) == 40 and not one & other


@pytest.mark.parametrize("prompts", [{"name": "random"}, PROSE, SUMMARIES], ids=lambda prompts: str(prompts["name"]))
def test_17_and_18_warm_up_requests_are_none_of_the_measured_ones(make: Make, prompts: dict[str, Any]) -> None:
    stream = make(prompts=prompts)
    measured, warm = stream.initial(), stream.warmup_requests(32)
    assert not {r.prompt_token_ids[0] for r in measured} & {r.prompt_token_ids[0] for r in warm}
    assert len({r.prompt_token_ids for r in warm}) == 32  # nor one request 32 times
    assert not {r.request_id for r in measured} & {r.request_id for r in warm}


@pytest.mark.parametrize("prompts", [{"name": "random"}, PROSE, SUMMARIES], ids=lambda prompts: str(prompts["name"]))
def test_20_no_two_prompts_begin_alike_unless_asked(make: Make, prompts: dict[str, Any]) -> None:
    requests = make(num_requests=200, prompts=prompts).initial()
    assert not any(a.prompt_token_ids[0] == b.prompt_token_ids[0] for a, b in combinations(requests, 2))
    assert not any(request.planned_cached_tokens for request in requests)


@pytest.mark.parametrize("prompts", [{"name": "random"}, PROSE], ids=lambda prompts: str(prompts["name"]))
def test_21_and_46_every_payload_is_distinct_and_every_concern_has_random_numbers_of_its_own(
    make: Make, prompts: dict[str, Any]
) -> None:
    """Also where there are more requests than first tokens (the word tokenizer gives 3,749)."""
    stream = make(num_requests=4000, prompts=prompts, prompt_length={"name": "constant", "value": 24})
    requests = stream.initial()
    assert len({request.prompt_token_ids for request in requests}) == 4000
    assert len({request.sampling.seed for request in requests}) == 4000
    plan = make(num_requests=2000, output_length={"name": "uniform", "low": 5, "high": 60}).plan
    assert (plan.prompt_tokens != plan.output_tokens).any()  # one law twice, from two child seeds


@pytest.mark.parametrize("length", [1, 2, 3, 17, 500])
@pytest.mark.parametrize("prompts", [{"name": "random"}, PROSE, SUMMARIES], ids=lambda prompts: str(prompts["name"]))
def test_27_a_prompt_has_exactly_the_tokens_asked_for(make: Make, prompts: dict[str, Any], length: int) -> None:
    """Ids are sent, not text: nothing is decoded and encoded again, and a prompt of one token is not empty."""
    stream = make(num_requests=20, prompts=prompts, prompt_length={"name": "constant", "value": length})
    assert {len(request.prompt_token_ids) for request in stream.initial()} == {length}


def test_41_nothing_of_one_run_is_left_for_the_next(make: Make) -> None:
    stream = make(
        sessions={"name": "multi_turn", "min_turns": 2, "max_turns": 3, "think_s": 1.0},
        arrivals={"name": "closed_loop", "concurrency": 4},
    )
    cut_short = stream.initial()
    stream.on_finish(cut_short[0], 1.0, (1,))  # and then the run is aborted
    issued, finished_s = stream.initial(), 0.0
    assert [request.request_id for request in issued] == [request.request_id for request in cut_short]
    for request in issued:  # grows while it is read
        finished_s += 1.0
        issued += stream.on_finish(request, finished_s, (1,))
    assert len({request.request_id for request in issued}) == len(issued) == stream.num_requests == 40
