"""8-bit keys and values in every other way of writing, sharing, moving and reading them: the tokens are those that the
same dtype gives in the plainest arm, and nothing is read that was not written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_testing import request, run
from head_testing import head_file
from test_kv_dtype_engine import BACKENDS, PROMPT, agree, engine_for

from harness.arm import option
from impls.models.source import open_model
from impls.seams import values_and_scales

SHARED = [request(f"r{i}", [*PROMPT[:33], 60 + i], 12) for i in range(5)]
SMALL = {"kv_cache": ("paged", {"block_size": 4})}
COMPILED = ("compiled", {"backend": "aot_eager"})  # traced and not built; what is built: tests/execution
DRAFT_MODEL = {"decoding": "speculative", "proposer": ("draft_model", {"model": "tiny", "precision": "fp32"})}

pytestmark = pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


@pytest.fixture(scope="module")
def eagle(tmp_path_factory):
    head = str(head_file(tmp_path_factory.mktemp("head"), "eagle"))
    return {"decoding": "speculative", "proposer": ("eagle", {"head": head, "num_draft_tokens": 3})}


def poisoned(engine):
    """A scale that nobody has written is NaN: whoever reads its slot fails its request."""
    for executor in (engine.executor, engine.draft_executor):
        if executor is not None:
            for layer in range(executor.storage.num_layers):
                for cache in (executor.storage.k(layer), executor.storage.v(layer)):
                    values_and_scales(cache)[1].fill_(torch.nan)
    return engine


@pytest.fixture(scope="module")
def plainest(tiny):
    """Tokens of the eager, autoregressive arm; those of one request alone once, however many ask for them."""
    known = {}

    def tokens(requests, kv_dtype, attention="sdpa", **drafts):
        key = (tuple(each.request_id for each in requests), kv_dtype, attention, str(drafts))
        if key not in known:
            known[key], _ = outputs(tiny, requests, kv_dtype=kv_dtype, attention=attention, **drafts)
        return known[key]

    return tokens


def outputs(tiny, requests, **choices):
    found, results = run(poisoned(engine_for(tiny, **choices)), requests)
    assert {e.finish_reason for r in results for e in r.emissions} <= {None, "length"}, "something unwritten was read"
    return found, [r.stats for r in results if r.stats]


@pytest.mark.parametrize("attention", BACKENDS[1:])
def test_a_compiled_model_keeps_them_as_an_eager_one_does(tiny, plainest, kv_dtype, attention):
    found, _ = outputs(tiny, SHARED, kv_dtype=kv_dtype, attention=attention, prefix="radix", execution=COMPILED)
    agree(tiny, kv_dtype, SHARED, plainest(SHARED, kv_dtype, attention), found)


CASES = {
    "plain": {},
    "blocks_of_one": {"kv_cache": ("paged", {"block_size": 1})},
    "contiguous": {"kv_cache": "contiguous"},
    "chunked": {"batching": ("chunked_prefill", {"max_num_batched_tokens": 24, "max_num_seqs": 4})},
    "preempted": {"budget_tokens": 300, **SMALL},
    "swapped": {"budget_tokens": 300, "batching": ("continuous", {"preemption": "swap"}), **SMALL},
    "hash_chain": {"prefix": "hash_chain", "batching": ("continuous", {"max_num_seqs": 2})},
    "radix": {"prefix": "radix", "batching": ("continuous", {"max_num_seqs": 2}), **SMALL},
    "compiled": {"execution": COMPILED},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_eagle_keeps_its_own_beside_them(tiny, plainest, eagle, kv_dtype, case):
    found, stats = outputs(tiny, SHARED, kv_dtype=kv_dtype, **CASES[case], **eagle)
    agree(tiny, kv_dtype, SHARED, plainest(SHARED, kv_dtype), found)
    assert sum(s.draft_tokens for s in stats) > 50
    assert (sum(s.preempted for s in stats) > 0) == (case in ("preempted", "swapped"))
    assert (sum(s.swapped_in_bytes for s in stats) > 0) == (case == "swapped")
    assert (sum(sum(s.cached_prompt_tokens.values()) for s in stats) > 0) == (case in ("hash_chain", "radix"))


FORKS = {
    "paged": SMALL,
    "radix": {"prefix": "radix", **SMALL},
    "hash_chain": {"prefix": "hash_chain", **SMALL},
    "chunked": {"batching": ("chunked_prefill", {"max_num_seqs": 8, "max_num_batched_tokens": 9}), **SMALL},
    "preempted": {"budget_tokens": 32, **SMALL},
    "swapped": {"budget_tokens": 32, "batching": ("continuous", {"max_num_seqs": 8, "preemption": "swap"}), **SMALL},
    "contiguous": {"kv_cache": "contiguous"},
    "draft_model": {**DRAFT_MODEL, **SMALL},
    "eagle": SMALL,
}


@pytest.mark.parametrize("case", FORKS)
def test_each_of_several_samples_is_what_its_name_alone_would_get(tiny, plainest, eagle, kv_dtype, case):
    """Copied blocks bring their scales with them. One of four may part: a sum that rounds otherwise in a batch can move
    a key by a whole step, and a sample with it."""
    drafts = eagle if case == "eagle" else DRAFT_MODEL if case == "draft_model" else {}
    several = request("r", PROMPT[:14], 8, n=4, temperature=0.9, seed=5)
    samples = several.samples()
    together, stats = outputs(tiny, samples, kv_dtype=kv_dtype, **{**drafts, **FORKS[case]})
    alone = [plainest([replace(s, parent_id=None)], kv_dtype, **drafts) for s in samples]
    assert sum(together[name] != tokens for each in alone for name, tokens in each.items()) <= 1
    assert len({tuple(tokens) for tokens in together.values()}) == 4, "samples are independent"
    assert sum(s.copied_blocks for s in stats) > 0
    assert (sum(s.preempted for s in stats) > 0) == (case in ("preempted", "swapped"))
