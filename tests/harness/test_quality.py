"""Perplexity, KL and top-1 agreement: by hand, against scipy, and on engines whose precisions are known to differ."""

from __future__ import annotations

import math
import pydoc_data.topics as pydoc_topics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch

from harness.arm import option, resolve_study
from harness.compose import compose_arm
from harness.drive import RealClock
from harness.quality import (
    TEXT_TOKENS,
    estimate,
    logits_of,
    measure_quality,
    quality_metrics,
    quality_of_arm,
    score,
    summary,
    t_quantile,
    texts,
)
from impls.build import build_engine
from impls.engine import Engine
from impls.models import calibration
from impls.models.calibration import calibration_texts
from impls.models.source import ModelSource, open_model


class Characters:
    """A token a character: what `texts` needs of a tokenizer."""

    special_token_ids = ()

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 512 for character in text]


@pytest.fixture(scope="module")
def tiny() -> ModelSource:
    return replace(open_model(option("model", "tiny")), tokenizer=Characters())  # type: ignore[arg-type]


def arm_of(source: ModelSource, budget_tokens: int, length: int, *choices: str) -> tuple[dict[str, Any], Engine]:
    """A resolved arm on the tiny model, and its engine."""
    limits = [f"kv_cache.budget={budget_tokens}tokens", f"model.max_model_len={length}"]
    composed = compose_arm(["study=none", "model=tiny", "device=cpu", *limits, *choices])
    config = resolve_study({"arm": composed})["arm"]
    return config, build_engine(config, source, RealClock())


def test_score_by_hand() -> None:
    """Three tokens of a vocabulary of two: the first predicts 1, the second 0, the last predicts nothing."""
    ours = torch.tensor([[0.0, math.log(3)], [math.log(4), 0.0], [9.0, -9.0]])
    theirs = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [-9.0, 9.0]])
    found = score(ours, theirs, [0, 1, 0])
    assert found.nll == pytest.approx(-(math.log(0.75) + math.log(0.8)) / 2)
    assert found.reference_nll == pytest.approx(-(math.log(0.5) + math.log(0.25)) / 2)
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    second = 0.25 * math.log(0.25 / 0.8) + 0.75 * math.log(0.75 / 0.2)
    assert found.kl == pytest.approx((first + second) / 2)
    assert found.agreement in (0.0, 0.5)  # theirs is a tie at the first: either choice may be called best
    same = score(theirs, theirs, [0, 1, 0])
    assert (same.kl, same.agreement) == (0.0, 1.0) and same.nll == same.reference_nll


@pytest.mark.parametrize("degrees", [1, 2, 4, 5, 7, 15, 200])
def test_the_quantile_is_students(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(scipy.stats.t.ppf(0.975, degrees), rel=1e-3)


def test_an_interval_is_over_texts_and_one_text_has_none() -> None:
    values = [0.1, 0.3, 0.2, 0.25, 0.4, 0.1]
    found = estimate(values)
    low, high = scipy.stats.t.interval(0.95, 5, loc=found.value, scale=scipy.stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-3), pytest.approx(high, rel=1e-3))
    assert estimate([0.5]).low is None


def test_texts_are_whole_seeded_and_none_that_a_quantiser_learns_from() -> None:
    tokenizer: Any = Characters()
    found = texts(tokenizer, 1000)
    assert [len(text) for text in found] == [TEXT_TOKENS] * 3 + [1000 - 3 * TEXT_TOKENS]
    assert found == texts(tokenizer, 1000) and len({tuple(text) for text in found}) == 4
    grams = {tuple(text[i : i + 20]) for text in found for i in range(len(text) - 20)}
    learnt = calibration_texts(tokenizer, 512, 20_000)
    assert sum(map(len, learnt)) == 20_000
    shared = sum(tuple(text[i : i + 20]) in grams for text in learnt for i in range(len(text) - 20))
    assert shared == 0
    topics = Path(pydoc_topics.__file__).read_text(encoding="utf-8")
    assert not any(docstring in topics for docstring in calibration._docstrings())


def test_logits_are_those_of_every_position_and_nothing_is_left_in_the_cache(tiny: ModelSource) -> None:
    _, engine = arm_of(tiny, 96, 64, "attention=reference")
    free = engine.kv.num_free_blocks
    ids = texts(tiny.tokenizer, 48)[0]  # type: ignore[arg-type]
    whole, part = logits_of(engine, ids), logits_of(engine, ids[:20])
    assert whole.shape == (48, 512)
    torch.testing.assert_close(whole[:20], part, rtol=1e-4, atol=1e-4)
    assert engine.kv.num_free_blocks == free
    engine.kv.allocate("another", 64)
    with pytest.raises(RuntimeError, match="cannot hold a text of 48 tokens"):
        logits_of(engine, ids)


def quality(tiny: ModelSource, precision: str) -> dict[str, Any]:
    config, engine = arm_of(tiny, 512, 256, "attention=sdpa", f"precision={precision}")
    ticks: list[int] = []
    found, warnings = measure_quality(engine, config, tiny, 700, lambda: ticks.append(1))
    assert found is not None and warnings == [] and len(ticks) == found["texts"] == 3 and found["tokens"] == 700
    return found


def test_fewer_bits_are_further_from_bf16_and_bf16_is_itself(tiny: ModelSource) -> None:
    same = quality(tiny, "bf16")
    assert same["kl_vs_bf16"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert same["top1_agreement"]["value"] == 1.0 and same["perplexity_ratio"]["value"] == 1.0
    metrics = quality_metrics(same)
    assert metrics == {"perplexity": same["perplexity"]["value"], "kl_vs_bf16": 0.0, "top1_agreement": 1.0}
    ladder = [quality(tiny, name) for name in ("int8_weight_only", "int4", "int3", "int2")]
    kl = [each["kl_vs_bf16"]["value"] for each in ladder]
    agreement = [each["top1_agreement"]["value"] for each in ladder]
    assert kl == sorted(kl) and kl[0] > 0 and kl[3] > 10 * kl[1] and agreement[0] > agreement[3]
    for each in ladder:
        estimates = [value for value in each.values() if isinstance(value, dict)]
        assert len(estimates) == 4 and all(e["low"] <= e["value"] <= e["high"] for e in estimates)


def test_what_cannot_be_measured_is_a_warning(tiny: ModelSource) -> None:
    config, engine = arm_of(tiny, 128, 128, "attention=sdpa")
    dumb = replace(tiny, tokenizer=None, tokenizer_reason="no tokenizer here")
    assert measure_quality(engine, config, dumb, 64) == (None, ["quality was not measured: no tokenizer here"])
    engine.kv.allocate("other", 100)
    found, warnings = measure_quality(engine, config, tiny, 64)
    assert found is None and "cannot hold a text of 64 tokens" in warnings[0]
    assert quality_of_arm(engine, config, tiny, list) == (None, []), "nobody asked"
    elsewhere = quality_of_arm(None, {**config, "quality_tokens": 64}, tiny, list)
    assert elsewhere[1] == ["quality was not measured: the arm has no engine in this process"]
    assert quality_metrics(None) == {"perplexity": None, "kl_vs_bf16": None, "top1_agreement": None}


def test_a_perplexity_is_that_of_the_mean_log_likelihood() -> None:
    logits = torch.zeros(5, 8)
    found = summary([score(logits, logits, [1, 2, 3, 4, 5])] * 2)
    assert found["perplexity"]["value"] == pytest.approx(8.0)
