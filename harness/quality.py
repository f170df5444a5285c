"""What an arm's numbers do to quality: its predictions of held-out text beside those of BF16 weights and cache."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.arm import option
from harness.drive import RealClock
from harness.statistics import CONFIDENCE, T_QUANTILES
from harness.texts import one_line
from impls.build import KV_DTYPES, build_engine
from impls.engine import Engine
from impls.models.source import ModelSource
from impls.step_batch import BatchRow, build_batch
from workloads.corpus import prose_passages
from workloads.tokenizer import Tokenizer

TEXT_TOKENS = 256
NORMAL_QUANTILE = 1.959963984540054
METRICS = ("perplexity", "kl_vs_bf16", "top1_agreement")


@dataclass(frozen=True)
class Estimate:
    """A mean over texts with its 95 % interval (t over the texts' own means); no interval from a single text."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class TextScore:
    """Means over one text's predictions, of every token but the first. ``nll``, ``kl``: nats."""

    nll: float
    reference_nll: float
    kl: float
    agreement: float


def texts(tokenizer: Tokenizer, num_tokens: int) -> list[list[int]]:
    """``num_tokens`` of natural text (Python's help topics) as token ids, in pieces of `TEXT_TOKENS`, the last shorter.

    Nothing that a quantiser has learnt from (`impls.models.calibration`). A seeded draw, the same for every arm; fewer
    tokens where the corpus ends.
    """
    passages = prose_passages()
    found: list[list[int]] = []
    for index in np.random.default_rng(0).permutation(len(passages)):
        left = num_tokens - sum(map(len, found))
        ids = tokenizer.encode(passages[index])[: min(TEXT_TOKENS, left)]
        if left >= 2 and len(ids) == min(TEXT_TOKENS, left):
            found.append(list(ids))
    return found


@torch.inference_mode()
def logits_of(engine: Engine, token_ids: Sequence[int]) -> Tensor:
    """FP32 [len(token_ids), vocab]: one prefill through the engine's own cache, attention and executor.

    RuntimeError if its cache cannot hold the text.
    """
    if not engine.kv.allocate("text", len(token_ids)):
        raise RuntimeError(f"the KV budget cannot hold a text of {len(token_ids)} tokens")
    try:
        count = len(token_ids)
        row = BatchRow("text", token_ids, 0, engine.kv.block_table("text"), count, count)
        return engine.executor.execute(build_batch([row], engine.kv.block_size, engine.device))[0]
    finally:
        engine.kv.free("text")


def score(logits: Tensor, reference: Tensor, token_ids: Sequence[int]) -> TextScore:
    """Of two models' FP32 logits [T, vocab] over one text of T tokens; KL is from the reference's distribution."""
    targets = torch.tensor(token_ids[1:], device=logits.device)[:, None]
    ours, theirs = logits[:-1].log_softmax(-1), reference[:-1].log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    nll, reference_nll = (-float(each.gather(1, targets).mean()) for each in (ours, theirs))
    return TextScore(nll, reference_nll, float(kl), float(same))


def estimate(values: Sequence[float]) -> Estimate:
    """The mean, with Student's 95 % interval; of a single value without one."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return Estimate(mean, None, None)
    half = t_quantile(n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half)


def t_quantile(degrees: int) -> float:
    """Student's t(.975): by table up to four degrees of freedom, then to three digits by Fisher's expansion."""
    known = T_QUANTILES[CONFIDENCE]
    if degrees <= len(known):
        return known[degrees - 1]
    z, v = NORMAL_QUANTILE, degrees
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / v + second / v**2 + third / v**3 + fourth / v**4


def summary(scores: Sequence[TextScore]) -> dict[str, Any]:
    """What run.json holds: each `METRICS` and ``perplexity_ratio`` (to the reference's) as an `Estimate`.

    A perplexity is that of the mean of the texts' log likelihoods, so that its interval says how much texts differ; the
    ratio's is paired by text.
    """
    kl = estimate([text.kl for text in scores])
    agreement = estimate([text.agreement for text in scores])
    return {
        "perplexity": _exponential(estimate([text.nll for text in scores])),
        "perplexity_ratio": _exponential(estimate([text.nll - text.reference_nll for text in scores])),
        "kl_vs_bf16": asdict(kl),
        "top1_agreement": asdict(agreement),
    }


def _exponential(of: Estimate) -> dict[str, float | None]:
    return {name: None if value is None else math.exp(min(value, 700.0)) for name, value in asdict(of).items()}


def measure_quality(
    engine: Engine,
    config: Mapping[str, Any],
    source: ModelSource,
    num_tokens: int,
    tick: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any] | None, list[str]]:
    """(`summary` with what it was measured on, warnings) of an arm's engine that has nothing to do any more.

    None, with the reason as a warning, where there is no text or no room: a window that has been measured is not lost
    to what comes after it. ``config``: the arm's; ``tick`` is called after each text.
    """
    if source.tokenizer is None:
        return None, [f"quality was not measured: {source.tokenizer_reason}"]
    length = min(TEXT_TOKENS, engine.max_model_len)
    pieces = [ids[:length] for ids in texts(source.tokenizer, num_tokens)]
    try:
        reference = build_engine(reference_config(config, source, length), source, RealClock())
        scores = []
        for ids in pieces:
            scores.append(score(logits_of(engine, ids), logits_of(reference, ids), ids))
            tick()
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError when a device is out of memory
        return None, [f"quality was not measured: {one_line(str(error))}"]
    if not scores:
        return None, [f"quality was not measured: no passage of text has {num_tokens} tokens"]
    digest = hashlib.sha256(repr(pieces).encode()).hexdigest()[:12]
    measured_on = {"text": f"Python's help topics, {digest}", "texts": len(pieces), "tokens": sum(map(len, pieces))}
    return measured_on | {"reference": "bf16"} | summary(scores), []


def quality_of_arm(
    engine: Engine | None, config: Mapping[str, Any], source: ModelSource, tick: Callable[[], None]
) -> tuple[dict[str, Any] | None, list[str]]:
    """`measure_quality` of as many tokens as ``config`` asks for. engine: None where it runs in another process, or
    the target is none of ours."""
    num_tokens = int(config.get("quality_tokens") or 0)
    if not num_tokens:
        return None, []
    if engine is None:
        return None, ["quality was not measured: the arm has no engine in this process"]
    return measure_quality(engine, config, source, num_tokens, tick)


def reference_config(config: Mapping[str, Any], source: ModelSource, length: int) -> dict[str, Any]:
    """The arm's model and attention with BF16 weights and cache, room for one text and nothing else."""
    paged = {key: value for key, value in option("kv_cache", "paged").items() if key != "budget"}
    per_token = source.shape.kv_bytes_per_token(KV_DTYPES["bf16"].itemsize)
    paged["budget_bytes"] = per_token * (length + int(paged["block_size"]))
    chosen = {
        "precision": "bf16",
        "kv_dtype": "bf16",
        "batching": "continuous",
        "prefix": "off",
        "decoding": "autoregressive",
        "execution": "eager",
    }
    return {**config, **{group: option(group, name) for group, name in chosen.items()}, "kv_cache": paged}


def quality_metrics(quality: Mapping[str, Any] | None) -> dict[str, float | None]:
    """The `METRICS` of a record, null where nothing was measured."""
    return {name: None if quality is None else quality[name]["value"] for name in METRICS}
