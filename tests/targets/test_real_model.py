"""The real model in FP32: transformers says what our engine says, up to where the model itself is undecided."""

from __future__ import annotations

import functools

import pytest
from target_runs import CONTINUOUS, FOREIGN, STATIC, resolved, run

import impls.targets.causal_lm
from harness.drive import RealClock
from harness.equivalence import FP32_TIE, TeacherForcer
from impls.build import build_target
from impls.models.source import ModelSource
from impls.request import Request, SamplingParams
from impls.targets.causal_lm import causal_lm

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
OUTPUT_TOKENS = 6
REAL = ("model=smollm2_135m", "model.max_model_len=48", "kv_cache.budget=384tokens")


def test_greedy_tokens_are_ours_up_to_a_near_tie(real_model: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    one = functools.cache(lambda *options: causal_lm(real_model.shape, real_model.weights(), *options))
    monkeypatch.setattr(impls.targets.causal_lm, "causal_lm", lambda shape, weights, *options: one(*options))
    assert real_model.tokenizer is not None
    prompts = {f"p{n}": real_model.tokenizer.encode(text) for n, text in enumerate(TEXTS)}
    added = [
        Request(key, tuple(ids), SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True))
        for key, ids in prompts.items()
    ]
    outputs = []
    for how in (CONTINUOUS, (*STATIC, *FOREIGN), (*CONTINUOUS, *FOREIGN)):
        target = build_target(resolved(*REAL, *how), real_model, RealClock())
        outputs.append(run(target, added).tokens())
        target.close()
    ours, *theirs = outputs
    assert "Paris" in real_model.tokenizer.decode(ours["p0"])
    forcer = None
    for tokens in theirs:
        for key, prompt in prompts.items():
            assert len(tokens[key]) == len(ours[key]) == OUTPUT_TOKENS
            parted = next((i for i, (a, b) in enumerate(zip(ours[key], tokens[key], strict=True)) if a != b), None)
            if parted is not None:
                forcer = forcer or TeacherForcer(resolved(*REAL, *CONTINUOUS))
                assert forcer.top2_gap([*prompt, *ours[key][:parted]]) < FP32_TIE
