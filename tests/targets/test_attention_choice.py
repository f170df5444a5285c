"""`target.attn_implementation`, and what of its cache follows. No FlashAttention is here: names are what counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from target_runs import CONTINUOUS, FOREIGN, STATIC, build, reasons, requests, resolved, run

from harness.drive import RealClock
from impls.targets.continuous import ContinuousBatchingTarget
from impls.targets.transformers import Transformers

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
FLASH = "target.attn_implementation=flash_attention_2"


def test_what_is_asked_for_is_what_attends_and_is_recorded() -> None:
    given = requests([9, 4], [3, 5])
    tokens = {}
    for name in ("sdpa", "eager"):
        target = build(*CONTINUOUS, *FOREIGN, f"target.attn_implementation={name}", clock=RealClock())
        tokens[name] = run(target, given).tokens()
        target.close()
        assert name in target.kernels["attention"] and target.kernels["kv_cache"] == "float32 in pages of 16"
    assert tokens["sdpa"] == tokens["eager"]
    assert build(*STATIC, *FOREIGN, "target.attn_implementation=eager").kernels["attention"] == "eager"


def test_flash_attention_needs_a_gpu_and_bf16() -> None:
    (reason,) = reasons(*CONTINUOUS, *FOREIGN, FLASH)
    assert reason == f"target=transformers: {FLASH}: needs device=cuda and precision=bf16"


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ((*CONTINUOUS, FLASH), {"block_size": 256}),
        ((*CONTINUOUS, FLASH, "kv_cache.block_size=512"), {}),
        ((*CONTINUOUS,), {}),
        ((*STATIC, FLASH), {}),
    ],
    ids=str,
)
def test_its_kernel_for_decodes_gets_the_pages_that_it_takes(how: tuple[str, ...], options: dict[str, int]) -> None:
    config = resolved(*how, *FOREIGN)
    assert Transformers(config["target"]["attn_implementation"]).cache_options(config) == options


@pytest.mark.parametrize(
    ("attention", "page", "length", "blocks"),
    [
        ("flash_attention_2", 256, 768, 4),
        ("paged|flash_attention_3", 256, 8192, 34),
        ("flash_attention_2", 16, 768, 0),
        ("sdpa", 256, 768, 0),
    ],
)
def test_a_block_table_holds_the_longest_request(attention: str, page: int, length: int, blocks: int) -> None:
    target: Any = ContinuousBatchingTarget.__new__(ContinuousBatchingTarget)
    target._model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention))
    target._kv, target.max_model_len = SimpleNamespace(block_size=page), length
    assert target._fast_blocks() == blocks
