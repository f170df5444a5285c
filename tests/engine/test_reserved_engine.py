"""One piece a sequence in a running engine: the tokens of a paged cache, nobody preempted, a piece per sequence."""

from __future__ import annotations

import pytest
import torch
from engine_testing import arm_config, build, option, request, run

from impls.models.source import open_model

LENGTH = 96


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


def run_with(tiny, kv_cache, **choices):
    config = arm_config(
        budget_tokens=4 * 32 + 3 * 8,
        source=tiny,
        max_model_len=LENGTH,
        **{
            "model": "tiny",
            "kv_cache": (kv_cache, {"block_size": 4}),
            "batching": ("continuous", {"max_num_seqs": 8}),
        }
        | choices,
    )
    engine = build(config, tiny)
    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 200, (3 + 2 * i,), generator=rng).tolist() for i in range(8)]
    outputs, results = run(engine, [request(f"r{i}", prompt, 6 + 2 * i) for i, prompt in enumerate(prompts)])
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
    return outputs, [result.stats for result in results if result.stats]


@pytest.mark.parametrize("proposer", [None, "ngram", "layer_skip"])
@pytest.mark.parametrize("batching", ["continuous", "chunked_prefill"])
@pytest.mark.parametrize("kv_cache", ["exact", "pow2"])
def test_the_tokens_are_those_of_a_paged_cache(tiny, kv_cache, batching, proposer):
    decoding = {} if proposer is None else {"decoding": "speculative", "proposer": proposer}
    limits = {"max_num_seqs": 8, **({"max_num_batched_tokens": 16} if batching == "chunked_prefill" else {})}
    expected, _ = run_with(tiny, "paged", attention="reference")
    outputs, steps = run_with(tiny, kv_cache, batching=(batching, limits), **decoding)
    assert outputs == expected
    assert sum(step.preempted for step in steps) == 0
    assert any(step.waiting for step in steps), "the cache was never full"
    for step in steps:
        for hold in step.kv_reservations:
            number = int(hold.request_id.removeprefix("r"))
            prompt, output = 3 + 2 * number, 6 + 2 * number
            asked = prompt + (output if kv_cache == "exact" else 1 << (output - 1).bit_length())
            assert hold.reserved == 4 * (1 << (-(-min(asked, LENGTH) // 4) - 1).bit_length())
