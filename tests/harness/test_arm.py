"""What is settled once per study: the KV budget in bytes, the draft's options, traffic that a model can read."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from safetensors.torch import save_file

from harness.arm import (
    budget_bytes,
    draft_options,
    model_fingerprints,
    option,
    readable_traffic,
    resolve_device,
    resolve_study,
    validate_arm,
)
from harness.compose import compose_arm
from harness.errors import BadInput
from impls.models.source import open_model

FREE = 10**9


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("3tokens", 3 * 2 * 2 * 2 * 16 * 2),  # K and V, 2 layers, 2 heads of 16, two bytes
        ("1 token", 2 * 2 * 2 * 16 * 2),
        (0.25, FREE // 4),
        ("0.5", FREE // 2),
        (4096, 4096),
        ("2KiB", 2048),
        ("1.5 MB", 1_500_000),
        ("1e6", 1_000_000),
    ],
)
def test_budget_in_bytes(tiny, budget, expected):
    assert budget_bytes(budget, tiny, FREE) == expected


@pytest.mark.parametrize("budget", ["", "0", "-5", "0tokens", "ten", "3 blocks", "nan", "inf", "1e400", "5%"])
def test_a_budget_that_buys_nothing_says_what_is_allowed(tiny, budget):
    with pytest.raises(BadInput, match=r"kv_cache.budget=.*allowed: bytes"):
        budget_bytes(budget, tiny, FREE)


def test_natural_prompts_become_random_tokens_without_a_tokenizer_and_say_so(tiny):
    workload = {"source": "a paper", "prompts": option("workload/prompts", "prose"), "num_requests": 3}
    changed = readable_traffic(workload, tiny)
    assert changed["prompts"]["name"] == "random"
    assert changed["source"] == "a paper; random tokens, as tiny has no tokenizer"
    assert changed["num_requests"] == 3 and workload["prompts"]["name"] == "prose"
    assert readable_traffic({"prompts": {"name": "random"}}, tiny) == {"prompts": {"name": "random"}}


def test_an_option_that_does_not_exist_names_the_nearest():
    with pytest.raises(BadInput, match="did you mean static"):
        option("batching", "statik")


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(BadInput, match="torch sees no CUDA device"):
        resolve_device("cuda")


def drafting_arm(kv_cache, budget, **options):
    """`tiny`, drafted by a second copy of itself in INT8."""
    names = {
        **{"model": "tiny", "batching": "continuous", "kv_cache": kv_cache, "kv_dtype": "bf16", "precision": "bf16"},
        **{"decoding": "speculative", "proposer": "draft_model", "attention": "sdpa", "execution": "eager"},
        "prefix": "off",
    }
    config = {group: option(group, name) for group, name in names.items()} | {"device": {"name": "cpu"}}
    config["batching"]["max_num_batched_tokens"] = 2048
    config["kv_cache"]["budget_bytes"] = budget
    return config | {"draft": draft_options(config)} | options


def test_a_draft_models_layers_lie_in_the_same_budget():
    # 2048 positions of K and V in 2 layers, 2 heads of 16, two bytes: 256 bytes each, twice that with a draft.
    one = 2048 * 256
    assert validate_arm(drafting_arm("contiguous", 2 * one)) == []
    assert validate_arm(drafting_arm("contiguous", 2 * one - 1)) == [
        "kv_cache=contiguous: kv_cache.budget buys 2047 tokens, fewer than one block of 2048: raise the budget"
    ]
    alone = drafting_arm("contiguous", one)
    del alone["draft"]
    assert validate_arm({**alone, "decoding": option("decoding", "autoregressive")}) == []


def test_a_draft_models_weights_must_fit_too(monkeypatch):
    # 2 layers x (64 x (64 + 2 x 32) + 64 x 64 + 3 x 64 x 128) = 73,728; two tables of 512 x 64.
    target, draft, activations = 73_728 * 2 + 4 * 32_768, 73_728 + 4 * 32_768, 2048 * 4 * 2 * (64 + 128)
    for memory, reasons in ((0, []), (-1, ["needs 0 GB, has 0 GB"])):
        has = target + draft + activations + 10**6 + memory
        monkeypatch.setattr("harness.limits.memory_total_bytes", lambda device, has=has: has)
        assert validate_arm(drafting_arm("paged", 10**6)) == reasons


def test_the_model_that_quality_is_measured_beside_must_fit_too(monkeypatch):
    # As above; BF16 has two bytes a weight, and the arm drafts with nothing.
    bf16, activations = 73_728 * 2 + 4 * 32_768, 2048 * 4 * 2 * (64 + 128)
    alone = drafting_arm("paged", 10**6)
    del alone["draft"]
    alone |= {"decoding": option("decoding", "autoregressive"), "quality_tokens": 512}
    told = "needs 0 GB, has 0 GB, with the BF16 model that quality_tokens compares with"
    for memory, tokens, reasons in ((0, 512, []), (-1, 512, [told]), (-1, 0, [])):
        has = 2 * bf16 + activations + 10**6 + memory
        monkeypatch.setattr("harness.limits.memory_total_bytes", lambda device, has=has: has)
        assert validate_arm({**alone, "quality_tokens": tokens}) == reasons


def test_a_precision_that_the_draft_model_cannot_have_is_refused():
    draft = {"model": option("model", "tiny"), "precision": option("precision", "gguf")}
    assert validate_arm(drafting_arm("paged", 10**6, draft=draft)) == [
        "proposer.precision=gguf: model=tiny is no GGUF file, whose blocks this would use"
    ]


def test_a_draft_of_another_vocabulary_is_refused():
    model = option("model", "tiny")
    other = {
        "model": {**model, "shape": {**model["shape"], "vocab_size": 256}},
        "precision": option("precision", "int8"),
    }
    assert validate_arm(drafting_arm("paged", 10**6, draft=other)) == [
        "proposer.model=tiny has a vocabulary of 256 tokens, the target 512: must be the same"
    ]


def test_fingerprints_follow_the_weights_of_the_model_and_of_its_draft(tmp_path):
    tiny = option("model", "tiny")
    folder = write_checkpoint(tmp_path, 0)
    config = drafting_arm("paged", 10**6, draft={"model": {"name": "d", "path": str(folder)}})
    first = model_fingerprints(config)
    assert list(first) == ["model", "draft"] and first["model"] != first["draft"]
    assert model_fingerprints(config) == first
    assert model_fingerprints({"model": {**tiny, "max_model_len": 7}}) == {"model": first["model"]}
    assert model_fingerprints({"model": {**tiny, "seed": 1}}) != {"model": first["model"]}
    write_checkpoint(tmp_path, 1)  # the same options, other weights in the file
    changed = model_fingerprints(config)
    assert changed["model"] == first["model"] and changed["draft"] != first["draft"]


def write_checkpoint(folder, seed):
    """The weights of `tiny` as a Hugging Face directory."""
    source = open_model({**option("model", "tiny"), "seed": seed})
    names = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    names |= {"num_kv_heads": "num_key_value_heads", "max_position": "max_position_embeddings"}
    config = {names.get(key, key): value for key, value in asdict(source.shape).items() if value is not None}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    save_file(dict(source.weights()), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("change", "said"), [("num_heads=3", "multiple of num_kv_heads"), ("head_dim=15", "odd")])
def test_a_shape_that_no_kernel_takes_is_not_run(change: str, said: str) -> None:
    config = resolve_study({"arm": compose_arm(["study=none", "model=tiny", "device=cpu", f"model.shape.{change}"])})
    (reason,) = validate_arm(config["arm"])
    assert said in reason
