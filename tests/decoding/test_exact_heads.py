"""A trained head drafts, the whole engine runs, and at temperature 1 the outputs' joint distribution is the target's:
chi-square on a model of four tokens. Medusa's typical acceptance must fail the same test."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import chisquare

import impls.build
from harness.arm import option
from harness.drive import VirtualClock
from impls.decoding import verifier
from impls.decoding.proposers.draft_sampler import DraftSampler
from impls.models.calibration import attention_within, flattened
from impls.models.llama import LlamaModel
from impls.models.source import open_model
from impls.precision.fp32 import Fp32
from impls.request import Request, SamplingParams
from scripts.draft_heads.modules import EagleHead, MedusaHeads

VOCAB, LENGTH, PROMPT, SAMPLES = 4, 4, (2, 0, 1), 1500
PARAMS = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=3, ignore_eos=True)
MODEL = option("model", "tiny") | {"max_model_len": 64, "seed": 4}  # no output has most of the probability
MODEL["shape"] = {**MODEL["shape"], "vocab_size": VOCAB}
SOURCE = open_model(MODEL)
ALPHA, REJECTED = 1e-4, 1e-7


@pytest.fixture(autouse=True)
def one_thread():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine_with(folder: Path, kind: str, **decoding: object):  # type: ignore[no-untyped-def]
    """Three of the four tokens can be drafted, by random weights."""
    torch.manual_seed(5)
    hidden = SOURCE.shape.hidden_size
    module: Any = EagleHead(SOURCE.shape, torch.ones(hidden)) if kind == "eagle" else MedusaHeads(hidden, 2)
    tensors = {name: each.detach() + 0.1 * torch.randn(each.shape) for name, each in module.tensors().items()}
    tensors["token_ids"] = torch.tensor([0, 1, 3], dtype=torch.int32)
    path = folder / "head.safetensors"
    save_file(tensors, path, {"recipe": json.dumps({"kind": kind, "model": SOURCE.fingerprint, "model_name": "t"})})
    names = {
        **{"batching": "continuous", "kv_cache": "paged", "prefix": "off", "kv_dtype": "auto", "precision": "fp32"},
        **{"attention": "sdpa", "execution": "eager", "decoding": "speculative", "proposer": kind},
    }
    config = {group: option(group, name) for group, name in names.items()}
    config |= {"model": MODEL, "device": {"name": "cpu"}}
    config["proposer"] |= {"head": str(path), "num_draft_tokens": 2}
    config["decoding"] |= decoding
    config["batching"] |= {"max_num_seqs": 128}
    config["kv_cache"]["budget_bytes"] = 2**23
    return impls.build.build_engine(config, SOURCE, VirtualClock())


def generate(engine: Any) -> tuple[np.ndarray, int]:
    """How often each output occurred, in the order of `product`, and how many drafts stood."""
    for i in range(SAMPLES):
        engine.add_request(Request(str(i), PROMPT, PARAMS))
    tokens: dict[str, list[int]] = {}
    accepted = 0
    while engine.has_work:
        result = engine.step(0.0)
        accepted += result.stats.accepted_tokens if result.stats else 0
        for emission in result.emissions:
            tokens.setdefault(emission.request_id, []).extend(emission.token_ids)
    codes = [int(np.ravel_multi_index(each, (VOCAB,) * LENGTH)) for each in tokens.values()]
    assert len(codes) == SAMPLES
    return np.bincount(codes, minlength=VOCAB**LENGTH).astype(float), accepted


@pytest.fixture(scope="module")
def joint() -> np.ndarray:
    """Probability of every output, from one pass over all that can come before its tokens."""
    model = LlamaModel(SOURCE.shape, SOURCE.weights(), Fp32(torch.device("cpu")), torch.device("cpu"))
    prefixes = [prefix for n in range(LENGTH) for prefix in product(range(VOCAB), repeat=n)]
    texts = [[*PROMPT, *prefix] for prefix in prefixes]
    with torch.inference_mode():
        hidden = model.forward(*flattened(texts, torch.device("cpu")), attention_within(texts))
        ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
        rows = dict(zip(prefixes, model.logits(hidden[ends]).double().softmax(1).numpy(), strict=True))
    outputs = product(range(VOCAB), repeat=LENGTH)
    return np.array([np.prod([rows[s[:n]][s[n]] for n in range(LENGTH)]) for s in outputs])


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square; cells expecting fewer than 5 are pooled."""
    wanted = expected * counts.sum()
    small = wanted < 5
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(wanted[~small], wanted[small].sum())
    assert len(wanted) > 30, "a few outputs are nearly all there is"
    return float(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_sampled_outputs_are_distributed_as_the_targets(kind: str, joint: np.ndarray, tmp_path: Path) -> None:
    counts, accepted = generate(engine_with(tmp_path, kind))
    assert accepted > SAMPLES / 4
    assert p_value(counts, joint) > ALPHA


def test_a_verifier_without_its_residual_is_found_out(
    joint: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "residual", lambda p, q: p)
    assert p_value(generate(engine_with(tmp_path, "eagle"))[0], joint) < REJECTED


def test_typical_acceptance_is_not_exact(joint: np.ndarray, tmp_path: Path) -> None:
    counts, accepted = generate(engine_with(tmp_path, "medusa", acceptance="typical"))
    assert accepted > SAMPLES / 4
    assert p_value(counts, joint) < REJECTED


def test_a_record_of_another_distribution_than_was_drawn_from_is_found_out(
    joint: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = DraftSampler._over_vocabulary
    monkeypatch.setattr(DraftSampler, "_over_vocabulary", lambda self, q: original(self, torch.full_like(q, 1 / 3)))
    assert p_value(generate(engine_with(tmp_path, "medusa"))[0], joint) < REJECTED
