"""Request streams: a million requests are planned at once; a prompt is built when it is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import best_seconds

from workloads import RequestStream, build_stream

VOCAB, PLANNED = 49152, 1_000_000


def stream_of(num_requests: int) -> RequestStream:
    config = {
        "name": "bench",
        "num_requests": num_requests,
        "arrivals": {"name": "poisson", "rate": 100.0},
        "prompt_length": {"name": "uniform", "low": 4, "high": 12},
        "output_length": {"name": "capped_exponential", "mean": 48.0, "cap": 192},
        "prompts": {"name": "random"},
    }
    return build_stream(config, seed=0, tokenizer=None, max_model_len=2048, vocab_size=VOCAB)


def test_planning_a_million_requests(benchmark: Any) -> None:
    stream = benchmark.pedantic(stream_of, (PLANNED,), rounds=2)
    plan = stream.plan
    assert stream.num_requests == len(plan.arrivals_s) == len(plan.prompt_tokens) == len(plan.output_tokens) == PLANNED
    assert np.all(np.diff(plan.arrivals_s) >= 0)
    assert plan.arrivals_s[-1] == pytest.approx(PLANNED / 100.0, rel=0.01)
    benchmark.extra_info.update(requests=PLANNED, tokens=int(plan.prompt_tokens.sum()))


@pytest.mark.parametrize("num_requests", [10_000, pytest.param(PLANNED, marks=pytest.mark.slow)])
def test_building_every_request(benchmark: Any, num_requests: int) -> None:
    """The million takes a minute or two and a gigabyte: `-m slow`."""
    stream = stream_of(num_requests)
    requests = benchmark.pedantic(stream.initial, rounds=1)
    assert len(requests) == num_requests
    assert sum(len(request.prompt_token_ids) for request in requests) == int(stream.plan.prompt_tokens.sum())
    best = best_seconds(benchmark)
    benchmark.extra_info.update(requests=num_requests)
    if best is not None:
        benchmark.extra_info.update(us_per_request=1e6 * best / num_requests)
