"""Which combinations of options claim to be exact, and what each of them must yield: the same greedy tokens in FP32."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from engine_testing import CONF, GROUPS, arm_config, build, request, run

import harness.arm
import impls.build
from impls.decoding.proposers.eagle import EagleProposer
from impls.engine import Engine
from impls.models.llama import LlamaModel
from impls.models.source import ModelSource
from impls.seams import Arm, ModelShape
from impls.step_batch import BatchRow, build_batch

Combination = tuple[str, ...]  # an option of each of AXES

NUM_LAYERS = 6  # of SmolLM2: its first ones, with its own final norm and head
SHAPE = ModelShape(49152, 576, 1536, NUM_LAYERS, 9, 3, 64, 8192, 100000.0, None, 1e-5, True)
MAX_MODEL_LEN = 48
BLOCK_SIZE = 4
MAX_NUM_SEQS = 3
TIGHT = 56  # tokens: less than three sequences grow to, so that they are preempted and what is cached is evicted
NUM_PROMPTS = 3
OUTPUT_TOKENS = 10
MIN_GAP = 0.01  # between the two best logits wherever a token is chosen; GEMMs of other shapes round by 1e-4

# Repetitive in part, or prompt lookup would find nothing.
TEXTS = (
    "Monday, Tuesday, Monday, Tuesday, Monday,",
    "1, 2, 3, 1, 2, 3, 1, 2,",
    "def f(n):\n    if n < 2:\n        return n\n    return f(n",
    "The cat sat on the mat. The dog sat on the",
    "import os\nimport sys\nimport re\nimport os\nimport",
    "Once upon a time there was a girl. Once upon a",
    "To be, or not to be, that is the question. To be, or",
    "red, green, blue, red, green, blue, red,",
)


def _names(group: str, first: str = "") -> list[str]:
    names = {path.stem for path in (CONF / group).glob("*.yaml")} - {"auto"}
    return sorted(names, key=lambda name: (name != first, name))


# A new option of one of these groups is covered from the moment when its conf file is there.
AXES: dict[str, list[str]] = {
    "batching": _names("batching"),
    "preemption": ["recompute", "swap"],
    "kv_cache": _names("kv_cache"),
    "prefix": _names("prefix"),
    "proposer": ["autoregressive", *_names("proposer")],
    "attention": _names("attention"),
    "execution": _names("execution", first="eager"),
    "overlap": ["off", "on"],
}
# Below every prompt: chunks tested with prompts that fit into one test nothing (vllm#55612).
BATCHED_TOKENS = {"chunked_prefill": 5}


def choices(combination: Combination, backend: str | None = None) -> dict[str, Any]:
    """Options of the arm, as `arm_config` takes them. ``backend``: of ``execution=compiled``."""
    chosen = dict(zip(AXES, combination, strict=True))
    batching: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS}
    if chosen["batching"] in BATCHED_TOKENS:
        batching["max_num_batched_tokens"] = BATCHED_TOKENS[chosen["batching"]]
    if chosen["preemption"] != "recompute":
        batching["preemption"] = chosen["preemption"]
    execution = {} if chosen["overlap"] == "off" else {"overlap": chosen["overlap"]}
    if backend is not None and chosen["execution"] == "compiled":
        execution["backend"] = backend
    found: dict[str, Any] = {
        "batching": (chosen["batching"], batching),
        "kv_cache": (chosen["kv_cache"], {} if chosen["kv_cache"] == "contiguous" else {"block_size": BLOCK_SIZE}),
        "prefix": chosen["prefix"],
        "attention": chosen["attention"],
        "execution": (chosen["execution"], execution),
    }
    if chosen["proposer"] != "autoregressive":
        found |= {"decoding": "speculative", "proposer": (chosen["proposer"], {"num_draft_tokens": 2})}
    return found


def reasons(combination: Combination) -> list[str]:
    """Why this combination cannot run on a CPU of this machine; by the options' own `validate`."""
    chosen = dict(zip(AXES, combination, strict=True))
    for group, key, default in (("batching", "preemption", "recompute"), ("execution", "overlap", "off")):
        if chosen[key] != default and key not in _option(group, chosen[group]):
            return [f"{group}={chosen[group]} has no option {key}"]
    return _reasons_of_proposer(chosen["proposer"]) + impls.build.validate_axes(_arm(combination))


@functools.cache
def _reasons_of_proposer(name: str) -> list[str]:
    """Asked once: one that comes with weights opens the model to find them."""
    if name == "autoregressive":
        return []
    plain = _arm(("continuous", "recompute", "paged", "off", name, "reference", "eager", "off"))
    option = _option("proposer", name)
    reasons: list[str] = impls.build.locate(option).validate(replace(plain, axes={**plain.axes, "proposer": option}))
    return reasons


@functools.cache
def _option(group: str, name: str) -> dict[str, Any]:
    return harness.arm.option(group, name)


@functools.cache
def _default(group: str) -> dict[str, Any]:
    return _option(group, {"model": "smollm2_135m", "precision": "fp32", "kv_dtype": "auto"}.get(group, "off"))


def _arm(combination: Combination) -> Arm:
    axes = {group: _default(group) for group in ("model", "precision", "kv_dtype")}
    axes |= {"decoding": _option("decoding", "autoregressive"), "proposer": _option("proposer", "ngram")}
    for group, choice in choices(combination).items():
        if group == "proposer":  # a stand-in for any
            continue
        name, changes = choice if isinstance(choice, tuple) else (choice, {})
        axes[group] = _option(group, name) | changes
    assert axes.keys() == set(GROUPS)
    return Arm(axes, SHAPE, MAX_MODEL_LEN, "cpu", budget_tokens(combination) * SHAPE.kv_bytes_per_token(4), 4)


def budget_tokens(combination: Combination, tight: int = TIGHT) -> int:
    """Paged sequences grow into each other's room; those in one piece find room for `MAX_NUM_SEQS` of them."""
    if "paged" in combination:
        own = EagleProposer.kv_bytes_per_token(SHAPE, 4) if "eagle" in combination else 0  # equally many blocks
        return round(tight * (1 + own / SHAPE.kv_bytes_per_token(4)))
    return 64 * MAX_NUM_SEQS + 64  # pieces are powers of two


def product() -> list[Combination]:
    """All combinations that can run."""
    return [each for each in itertools.product(*AXES.values()) if not reasons(each)]


def covering(rows: Sequence[Combination]) -> list[Combination]:
    """Few of the rows, in which every two options meet that meet in any: greedily, the one that adds most pairs."""
    pairs = {row: frozenset(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


# --- what runs --------------------------------------------------------------------------------------------------------


def first_layers(source: ModelSource, num_layers: int) -> ModelSource:
    return replace(source, shape=replace(source.shape, num_layers=num_layers))


@contextmanager
def one_model_for_all(source: ModelSource) -> Iterator[None]:
    """Every engine that is built here runs ``source``, drafts with it where it drafts with a model, and is given what
    was packed and compiled before: packing takes a second, compiling many."""
    models: dict[Any, LlamaModel] = {}
    executors: dict[int, Any] = {}
    construct: Callable[..., Any] = impls.build.construct

    def model(shape: ModelShape, weights: Any, method: Any, device: Any, *calibration: Any) -> LlamaModel:
        key = (shape, type(method))
        if key not in models:
            models[key] = LlamaModel(shape, weights, method, device, *calibration)
        return models[key]

    def constructed(config: Any, **runtime: Any) -> Any:
        if config.get("name") != "compiled":
            return construct(config, **runtime)
        key = id(runtime["model"])
        if key not in executors:
            executors[key] = construct(config, **runtime)
        executors[key].attention, executors[key].storage = runtime["attention"], runtime["storage"]
        executors[key].overlap = config.get("overlap") == "on"
        return executors[key]

    names = {"LlamaModel": model, "construct": constructed, "open_model": lambda config: source}
    before = {name: getattr(impls.build, name) for name in names}
    try:
        for name, value in names.items():
            setattr(impls.build, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(impls.build, name, value)


@dataclass(frozen=True)
class Expected:
    prompt: list[int]
    tokens: list[int]


def oracle(source: ModelSource) -> list[Expected]:
    """What plain prefill gives, one sequence at a time, through `reference`, where no two logits are nearly equal."""
    config = arm_config(
        budget_tokens=MAX_MODEL_LEN, source=source, max_model_len=MAX_MODEL_LEN, attention="reference"
    )
    engine = build(config, source)
    engine.kv.allocate("one", MAX_MODEL_LEN)
    chosen = []
    for text in TEXTS:
        prompt = list(source.tokenizer.encode(text))
        tokens, gaps, computed = list(prompt), [], 0
        while len(tokens) < len(prompt) + OUTPUT_TOKENS:
            row = BatchRow("one", tokens[computed:], computed, engine.kv.block_table("one"), 1, len(tokens) - computed)
            with torch.inference_mode():
                logits, _ = engine.executor.execute(build_batch([row], engine.kv.block_size, engine.device))
            best, second = logits[0].topk(2).values.tolist()
            gaps.append(best - second)
            computed = len(tokens)
            tokens.append(int(logits[0].argmax()))
        if min(gaps) > MIN_GAP:
            chosen.append(Expected(prompt, tokens[len(prompt) :]))
        if len(chosen) == NUM_PROMPTS:
            return chosen
    raise AssertionError(f"only {len(chosen)} prompts have all top-2 gaps above {MIN_GAP}")


def check(
    combination: Combination,
    source: ModelSource,
    expected: Sequence[Expected],
    backend: str | None = None,
    tight: int = TIGHT,
) -> None:
    """AssertionError for another token, for a slot that is read before it is written, for a block that is lost, and for
    an option that was not put to use. Each prompt comes twice, so that there is something to share."""
    config = arm_config(
        budget_tokens=budget_tokens(combination, tight),
        source=source,
        max_model_len=MAX_MODEL_LEN,
        **choices(combination, backend),
    )
    engine = build(config, source)
    poison(engine)
    wanted = {f"{again}{i}": each for again in ("", "again") for i, each in enumerate(expected)}
    outputs, results = run(engine, [request(name, each.prompt, OUTPUT_TOKENS) for name, each in wanted.items()])
    assert outputs == {name: each.tokens for name, each in wanted.items()}
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
    chosen = dict(zip(AXES, combination, strict=True))
    stats = [result.stats for result in results if result.stats]
    if chosen["kv_cache"] == "paged" and chosen["batching"] != "static":
        assert sum(each.preempted for each in stats) > 0
        assert (sum(each.swapped_in_bytes for each in stats) > 0) == (chosen["preemption"] == "swap")
    assert (sum(sum(each.cached_prompt_tokens.values()) for each in stats) > 0) == (chosen["prefix"] != "off")
    assert (sum(each.draft_tokens for each in stats) > 0) == (chosen["proposer"] != "autoregressive")
    engine.close()


def poison(engine: Engine) -> None:
    for executor in (engine.executor, engine.draft_executor):
        if executor is not None:
            for layer in range(executor.storage.num_layers):
                executor.storage.k(layer).fill_(math.nan)
                executor.storage.v(layer).fill_(math.nan)
