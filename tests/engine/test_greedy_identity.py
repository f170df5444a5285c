"""FP32 greedy tokens are the same whatever schedules, stores or drafts them (DESIGN section 6, Equivalence)."""

from __future__ import annotations

import math

import pytest
import torch
from engine_testing import arm_config, build, request, run

import impls.build
from impls.models.llama import LlamaModel
from impls.step_batch import BatchRow, build_batch

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a little girl who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The three primary colours are red,",
    "Water boils at a temperature of",
    "import os\nimport sys\n\ndef main():\n",
    "In 1969 the first humans landed on the",
    "Roses are red, violets are",
    "Monday, Tuesday, Wednesday,",
    "1, 2, 3, 4, 5, 6,",
    "The quick brown fox jumps over the lazy",
    "Question: What is two plus two?\nAnswer:",
    "To be, or not to be, that is the",
    "Photosynthesis is the process by which plants",
)
OUTPUT_TOKENS = 12
NUM_PROMPTS = 8
MIN_GAP = 0.01
MAX_MODEL_LEN = 96
# The budget is below almost every prompt: chunks tested with prompts that fit into one test nothing (vllm#55612).
LIMITS = {
    "static": {"max_num_seqs": 4},
    "continuous": {"max_num_seqs": 4},
    "chunked_prefill": {"max_num_seqs": 4, "max_num_batched_tokens": 5},
}


@pytest.fixture(scope="module", autouse=True)
def one_model_for_all(real_model):
    """Packing the weights takes a second, and every engine here has the same."""
    kept = {}

    def cached(shape, weights, method, device, *calibration):
        key = (shape, type(method))
        if key not in kept:
            kept[key] = LlamaModel(shape, weights, method, device, *calibration)
        return kept[key]

    patch = pytest.MonkeyPatch()
    patch.setattr(impls.build, "LlamaModel", cached)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def oracle(real_model):
    """At least eight prompts with the tokens that plain prefill, one sequence at a time, gives through `reference`."""
    config = arm_config(
        budget_tokens=MAX_MODEL_LEN, source=real_model, max_model_len=MAX_MODEL_LEN, attention="reference"
    )
    engine = build(config, real_model)
    chosen: dict[str, tuple[list[int], list[int]]] = {}
    for index, text in enumerate(TEXTS):
        prompt = real_model.tokenizer.encode(text)
        engine.kv.allocate("one", MAX_MODEL_LEN)
        table, tokens, smallest = engine.kv.block_table("one"), list(prompt), math.inf
        computed = 0
        while len(tokens) < len(prompt) + OUTPUT_TOKENS:
            row = BatchRow("one", tokens[computed:], computed, table, 1, len(tokens) - computed)
            with torch.inference_mode():
                logits, _ = engine.executor.execute(build_batch([row], engine.kv.block_size, engine.device))
            best, second = logits[0].topk(2).values.tolist()
            smallest, computed = min(smallest, best - second), len(tokens)
            tokens.append(int(logits[0].argmax()))
        engine.kv.free("one")
        if smallest > MIN_GAP:
            chosen[f"p{index}"] = (list(prompt), tokens[len(prompt) :])
        if len(chosen) == NUM_PROMPTS:
            break
    assert len(chosen) == NUM_PROMPTS, f"only {len(chosen)} prompts have all top-2 gaps above {MIN_GAP}"
    return chosen


ARMS = [
    *((batching, kv_cache) for batching in ("static", "continuous") for kv_cache in ("contiguous", "paged")),
    ("chunked_prefill", "paged"),
    pytest.param("chunked_prefill", "contiguous", marks=pytest.mark.slow),  # many a step: chunks are small here
]


@pytest.mark.parametrize("proposer", [None, "ngram", "layer_skip", "draft_model"])
@pytest.mark.parametrize(("batching", "kv_cache"), ARMS)
def test_every_arm_gives_the_oracles_tokens(real_model, oracle, batching, kv_cache, proposer):
    decoding = {} if proposer is None else {"decoding": "speculative", "proposer": proposer}
    config = arm_config(
        budget_tokens=4 * MAX_MODEL_LEN,
        source=real_model,
        max_model_len=MAX_MODEL_LEN,
        batching=(batching, LIMITS[batching]),
        kv_cache=kv_cache,
        **decoding,
    )
    engine = build(config, real_model)
    outputs, results = run(engine, [request(name, prompt, OUTPUT_TOKENS) for name, (prompt, _) in oracle.items()])
    assert outputs == {name: tokens for name, (_, tokens) in oracle.items()}
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
    if proposer is not None:
        drafted = sum(r.stats.draft_tokens for r in results if r.stats)
        accepted = sum(r.stats.accepted_tokens for r in results if r.stats)
        assert drafted > 0 and 0 <= accepted <= drafted
        steps = sum(r.stats is not None for r in results)
        emitted = sum(len(e.token_ids) for r in results for e in r.emissions)
        assert emitted == len(oracle) * OUTPUT_TOKENS and steps > 0


@pytest.mark.parametrize("decoding", [{}, {"decoding": "speculative", "proposer": "layer_skip"}])
@pytest.mark.parametrize(
    ("batching", "preemption"),
    [
        ("continuous", "recompute"),
        ("continuous", "swap"),
        ("chunked_prefill", "swap"),
        pytest.param("chunked_prefill", "recompute", marks=pytest.mark.slow),
    ],
)
def test_preemption_changes_no_token(real_model, oracle, batching, preemption, decoding):
    config = arm_config(
        budget_tokens=5 * 16,  # five blocks for four sequences of up to two: they grow into each other's room
        source=real_model,
        max_model_len=MAX_MODEL_LEN,
        batching=(batching, {**LIMITS[batching], "preemption": preemption}),
        **decoding,
    )
    engine = build(config, real_model)
    outputs, results = run(engine, [request(name, prompt, OUTPUT_TOKENS) for name, (prompt, _) in oracle.items()])
    assert sum(r.stats.preempted for r in results if r.stats) > 0
    assert (sum(r.stats.swapped_in_bytes for r in results if r.stats) > 0) == (preemption == "swap")
    assert outputs == {name: tokens for name, (_, tokens) in oracle.items()}


@pytest.mark.parametrize(
    ("prefix", "decoding"), [("radix", {}), ("hash_chain", {"decoding": "speculative", "proposer": "layer_skip"})]
)
def test_shared_blocks_change_no_token(real_model, oracle, prefix, decoding):
    """Prompts come twice, in a cache too small for three of them: shared, evicted, preempted and found again."""
    config = arm_config(
        budget_tokens=64,
        source=real_model,
        max_model_len=MAX_MODEL_LEN,
        batching=("continuous", {"max_num_seqs": 3}),
        kv_cache=("paged", {"block_size": 4}),
        prefix=prefix,
        **decoding,
    )
    engine = build(config, real_model)
    some = list(oracle.items())[:3]
    twice = {f"{name}{again}": expected for again in ("", " again") for name, expected in some}
    outputs, results = run(engine, [request(name, prompt, OUTPUT_TOKENS) for name, (prompt, _) in twice.items()])
    assert outputs == {name: tokens for name, (_, tokens) in twice.items()}
    assert sum(r.stats.preempted for r in results if r.stats) > 0
    assert sum(sum(r.stats.cached_prompt_tokens.values()) for r in results if r.stats) > 0
