"""kv_dtype through whole engines: which arms run, what the record says, and what changes in what is predicted."""

from __future__ import annotations

import pytest
import torch
from engine_testing import arm_config, build, request, run

from harness.arm import option, resolve_study, validate_arm
from harness.compose import compose_arm
from harness.drive import VirtualClock
from harness.engine_facts import engine_facts
from harness.equivalence import is_fp32, same_precision
from harness.quality import logits_of, score
from impls import native
from impls.attention.sdpa import SDPAAttention
from impls.build import WorkerBuilder, build_cache
from impls.models.source import open_model

PROMPT = list(range(3, 60))
BACKENDS = ["reference", "sdpa", *(["native"] if native.available() else [])]


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


def engine_for(tiny, *, budget_tokens=1024, **choices):
    config = arm_config(budget_tokens=budget_tokens, source=tiny, max_model_len=128, **{"model": "tiny", **choices})
    return build(config, tiny, VirtualClock())


@pytest.mark.parametrize(("kv_dtype", "least", "most"), [("int8", 1e-5, 1e-3), ("fp8", 1e-4, 3e-2)])
def test_predictions_come_from_the_rounded_cache_and_are_near(tiny, kv_dtype, least, most):
    """Whatever the attention; quality is measured through the cache, so that it shows what the cache costs."""
    exact = logits_of(engine_for(tiny, kv_dtype="fp32"), PROMPT)
    found = [logits_of(engine_for(tiny, kv_dtype=kv_dtype, attention=backend), PROMPT) for backend in BACKENDS]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=5e-3, rtol=0)  # a last bit may round K/V to the other side
    assert least < score(found[0], exact, PROMPT).kl < most


def test_int8_is_finer_than_fp8(tiny):
    exact = logits_of(engine_for(tiny, kv_dtype="fp32"), PROMPT)
    kl = {name: score(logits_of(engine_for(tiny, kv_dtype=name), PROMPT), exact, PROMPT).kl for name in ("int8", "fp8")}
    assert 0 < 4 * kl["int8"] < kl["fp8"]


def agree(tiny, kv_dtype, requests, expected, found):
    """Equal tokens, up to where two are almost equally likely: a GEMM of another shape can move a last bit, and a
    rounded key then moves by a whole step. Most requests must not part at all."""
    parted = 0
    for each in requests:
        pairs = zip(expected[each.request_id], found[each.request_id], strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            read = [*each.prompt_token_ids, *expected[each.request_id][:first]]
            best, second = logits_of(engine_for(tiny, kv_dtype=kv_dtype), read)[-1].topk(2).values.tolist()
            assert best - second < 0.02, f"{each.request_id} parts at {first}"
            parted += 1
    assert 2 * parted < len(requests)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_sequences_go_on_from_the_same_numbers(tiny, kv_dtype, preemption):
    requests = [request(f"r{i}", PROMPT[i : i + 20], 30) for i in range(5)]
    batching = ("continuous", {"max_num_seqs": 4, "preemption": preemption})
    ample, _ = run(engine_for(tiny, kv_dtype=kv_dtype, batching=batching), requests)
    tight, results = run(engine_for(tiny, kv_dtype=kv_dtype, batching=batching, budget_tokens=128), requests)
    preempted = sum(r.stats.preempted for r in results if r.stats)
    assert preempted > 0, "the cache was never short: nothing was tested"
    agree(tiny, kv_dtype, requests, ample, tight)
    if preemption == "swap":
        moved = sum(r.stats.swapped_out_bytes for r in results if r.stats)
        assert moved > 0 and moved % (16 * tiny.shape.kv_bytes_per_token(1)) == 0


@pytest.mark.parametrize(("decoding", "proposer"), [("autoregressive", "ngram"), ("speculative", "layer_skip"),
                                                    ("speculative", "draft_model")])  # fmt: skip
@pytest.mark.parametrize("prefix", ["off", "radix"])
def test_runs_with_the_other_axes(tiny, decoding, proposer, prefix):
    """Rounding knows nothing of the batch, so that other ways to the same positions find the same tokens."""
    requests = [request(f"r{i}", [*PROMPT[:33], 60 + i], 12) for i in range(5)]
    plain, _ = run(engine_for(tiny, kv_dtype="int8"), requests)
    other = engine_for(tiny, kv_dtype="int8", decoding=decoding, proposer=proposer, prefix=prefix)
    agree(tiny, "int8", requests, plain, run(other, requests)[0])


def resolved(*overrides):
    composed = compose_arm(["study=none", "model=tiny", "device=cpu", "kv_cache.budget=600tokens", *overrides])
    return resolve_study({"arm": composed})["arm"]


def test_a_budget_holds_more_blocks_by_the_exact_factor(tiny):
    """Heads of 16: 32 bytes in BF16, 16 and a scale of 2 in 8 bits."""
    names = ("fp32", "bf16", "int8", "fp8")
    blocks = {name: build_cache(resolved(f"kv_dtype={name}"), tiny).num_blocks for name in names}
    assert blocks == {"fp32": 300 // 16, "bf16": 600 // 16, "int8": 600 * 32 // 18 // 16, "fp8": 600 * 32 // 18 // 16}
    for name in names:
        taken = WorkerBuilder().storage_bytes(resolved(f"kv_dtype={name}"))
        assert taken <= 600 * tiny.shape.kv_bytes_per_token(2) + tiny.shape.kv_bytes_per_token(4), name


def test_a_draft_models_keys_lie_in_the_same_bytes(tiny):
    config = resolved("kv_dtype=int8", "decoding=speculative", "proposer=draft_model")
    assert build_cache(config, tiny).num_blocks == 600 * 32 // (2 * 18) // 16


def test_bytes_of_a_step_are_those_of_what_is_kept(tiny):
    facts = {name: engine_facts(engine_for(tiny, kv_dtype=name), size) for name, size in (("bf16", 2), ("int8", 1))}
    per_token = {name: found.models["target"].kv_bytes_per_token for name, found in facts.items()}
    assert per_token == {"bf16": 2 * 2 * 2 * 32, "int8": 2 * 2 * 2 * 18}
    assert facts["bf16"].kernels["attention"] == "SDPAAttention"
    assert facts["int8"].kernels["attention"] == f"SDPAAttention, {SDPAAttention.reads_scaled}"


def test_what_cannot_read_8_bits_says_so_before_anything_runs(tiny):
    assert validate_arm(resolved("kv_dtype=int8")) == [] == validate_arm(resolved("kv_dtype=fp8", "precision=fp32"))
    config = resolved("kv_dtype=int8", "attention=sdpa")
    assert validate_arm(config) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SDPAAttention, "reads_scaled", None)
        assert validate_arm(config) == ["attention=sdpa: cannot read 8-bit keys and values (kv_dtype)"]
        assert validate_arm(resolved("kv_dtype=bf16", "attention=sdpa")) == []


def test_8_bits_are_a_precision_of_their_own():
    """FP32's near-ties excuse nothing where keys are rounded, and different types are never held to equal tokens."""
    fp32, rounded = resolved("precision=fp32"), resolved("precision=fp32", "kv_dtype=int8")
    assert is_fp32(fp32) and not is_fp32(rounded) and not is_fp32(resolved("precision=fp32", "kv_dtype=bf16"))
    assert same_precision(rounded, rounded) and not same_precision(fp32, rounded)
    assert not same_precision(rounded, resolved("precision=fp32", "kv_dtype=fp8"))
    assert same_precision(resolved("precision=bf16"), resolved("precision=bf16", "kv_dtype=bf16"))
