"""Draft heads with random weights for the tiny model, and what an engine makes with them."""

from __future__ import annotations

import json
from pathlib import Path

import engine_testing as arms
import torch
from safetensors.torch import save_file

from impls.models.calibration import attention_within
from impls.models.llama import LlamaModel
from impls.models.source import ModelSource, open_model
from impls.precision.fp32 import Fp32
from scripts.draft_heads.modules import EagleHead, MedusaHeads

SOURCE = open_model(arms.load("model/tiny"))
HIDDEN = SOURCE.shape.hidden_size
MEDUSA_HEADS = 4


def head_file(folder: Path, kind: str, source: ModelSource = SOURCE) -> Path:
    """A random head whose draft vocabulary is every second token."""
    torch.manual_seed(1)
    if kind == "eagle":
        tensors = EagleHead(source.shape, torch.rand(HIDDEN) + 0.5).tensors()
    else:
        blank = MedusaHeads(HIDDEN, MEDUSA_HEADS).tensors()
        tensors = {name: 0.2 * torch.randn(each.shape) for name, each in blank.items()}
    tensors = {name: each.detach().clone() for name, each in tensors.items()}
    tensors["token_ids"] = torch.arange(0, source.shape.vocab_size, 2, dtype=torch.int32)
    path = folder / f"{kind}.safetensors"
    save_file(tensors, path, {"recipe": json.dumps({"kind": kind, "model": source.fingerprint, "model_name": "t"})})
    return path


def prompts(shared: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    common = torch.randint(0, 512, (shared,), generator=draw).tolist()
    return [common + torch.randint(0, 512, (5 + 7 * i,), generator=draw).tolist() for i in range(6)]


def outputs(path: Path | None, budget_tokens: int = 2000, shared: int = 0, k: int = 3, **choices):  # type: ignore[no-untyped-def]
    """Output tokens, step results, the engine. path: a file of `head_file`, which names its kind; None: no drafts."""
    sampling = choices.pop("sampling", {})
    if path is not None:
        choices = {
            "decoding": "speculative",
            "proposer": (path.stem, {"head": str(path), "num_draft_tokens": k}),
            **choices,
        }
    config = arms.arm_config(budget_tokens=budget_tokens, source=SOURCE, max_model_len=256, model="tiny", **choices)
    engine = arms.build(config, SOURCE)
    requests = [arms.request(str(i), p, 24, **sampling) for i, p in enumerate(prompts(shared))]
    found, results = arms.run(engine, requests)
    return found, results, engine


CASES = {
    "plain": {},
    "one_draft": {"k": 1, "kv_cache": ("paged", {"block_size": 4})},
    "blocks_of_one": {"kv_cache": ("paged", {"block_size": 1})},
    "contiguous": {"kv_cache": "contiguous"},
    "static": {"batching": "static", "kv_cache": "contiguous"},
    "chunked": {"batching": ("chunked_prefill", {"max_num_batched_tokens": 16, "max_num_seqs": 4})},
    "preempted": {"budget_tokens": 150, "kv_cache": ("paged", {"block_size": 4})},
    "swapped": {
        "budget_tokens": 150, "kv_cache": ("paged", {"block_size": 4}),
        "batching": ("continuous", {"preemption": "swap"}),
    },
    "hash_chain": {"shared": 32, "prefix": "hash_chain", "batching": ("continuous", {"max_num_seqs": 2})},
    "radix": {"shared": 32, "prefix": "radix", "batching": ("continuous", {"max_num_seqs": 2})},
}  # fmt: skip


def target_states(source: ModelSource = SOURCE):  # type: ignore[no-untyped-def]
    """From tokens to the target's final-normed states, [n, hidden], in one pass."""
    model = LlamaModel(source.shape, source.weights(), Fp32(torch.device("cpu")), torch.device("cpu"))

    def states(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attention_within([tokens]))

    return states
