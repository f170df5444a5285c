"""What is settled once per study: the KV budget in bytes, the draft's options, traffic that a model can read."""

from __future__ import annotations

import pytest

from harness.arm import budget_bytes, option, readable_traffic, resolve_device
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
