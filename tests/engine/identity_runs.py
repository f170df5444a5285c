"""What every exact combination must yield, the same greedy tokens in FP32, and what it must have done for that."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_testing import arm_config, build, request, run
from identity import AXES, MAX_MODEL_LEN, TIGHT, Combination, budget_tokens, choices, topology

import impls.build
import impls.topology.workers
from harness.drive import RealClock
from impls.engine import Engine
from impls.models.llama import LlamaModel
from impls.models.source import ModelSource
from impls.request import Request
from impls.seams import DecodeCosts, ModelShape, StepStats, Topology
from impls.step_batch import BatchRow, build_batch

NUM_PROMPTS = 3
OUTPUT_TOKENS = 10
# For draft_length=adaptive: more than four rows never pay, up to four nearly always do.
COSTS = DecodeCosts({1: 1.0, 4: 1.1, 5: 100.0}, {1: 0.01})
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


def first_layers(source: ModelSource, num_layers: int) -> ModelSource:
    return replace(source, shape=replace(source.shape, num_layers=num_layers))


@contextmanager
def one_model_for_all(source: ModelSource) -> Iterator[None]:
    """Every engine that is built here runs ``source``, drafts with it where it drafts with a model, and is given what
    was packed and compiled before: packing takes a second, compiling many. So is one in a worker process, which is a
    fork of this one. Workers have one thread, hence all: what is compiled for another number is compiled again."""
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

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(impls.build, "LlamaModel", model)
        patch.setattr(impls.build, "construct", constructed)
        patch.setattr(impls.build, "open_model", lambda config: source)
        patch.setattr(impls.topology.workers, "worker_context", lambda clock: _forking())
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _forking() -> Any:
    """What starts workers as forks of this process. They let go of the router's ends of all pipes: a worker ends when
    it sees its own closed, and that is not before the last who has it closes it."""
    context, routers_ends = multiprocessing.get_context("fork"), []

    def pipe() -> Any:
        ends = context.Pipe()
        routers_ends.append(ends[0])
        return ends

    def process(*, target: Callable[..., None], **options: Any) -> Any:
        def work(*arguments: Any) -> None:
            for end in routers_ends:
                end.close()
            target(*arguments)

        return context.Process(target=work, **options)

    return SimpleNamespace(Pipe=pipe, Process=process)


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
    an option that was not put to use. Each prompt comes twice, so that there is something to share: as two requests, or
    as two samples of one."""
    chosen = dict(zip(AXES, combination, strict=True))
    config = arm_config(
        budget_tokens=budget_tokens(chosen, tight),
        source=source,
        max_model_len=MAX_MODEL_LEN,
        **choices(chosen, backend),
    )
    target = impls.build.build_target(config | {"topology": topology(chosen["topology"])}, source, RealClock())
    try:
        _everywhere(target, _prepare)
        apart = chosen["topology"] != "colocated"
        wanted = asked(expected[:-1] if apart else expected, int(chosen["samples"]))  # apart: two for each worker
        outputs, results = run(target, [each for each, _ in wanted])
        assert outputs == {each.request_id: list(tokens) for each, tokens in wanted}
        _everywhere(target, _check_idle)
        _check_use(chosen, [each for each, _ in wanted], [result.stats for result in results if result.stats])
    finally:
        target.close()


def asked(expected: Sequence[Expected], samples: int) -> list[tuple[Request, Sequence[int]]]:
    """What is submitted and what must come back. The last has the most urgent priority."""
    found = []
    for again in ("", "again") if samples == 1 else ("",):
        for i, each in enumerate(expected):
            one = request(f"{again}{i}", each.prompt, OUTPUT_TOKENS, n=samples)
            found += [(sample, each.tokens) for sample in replace(one, priority=-len(found)).samples()]
    return found


def _check_use(chosen: Mapping[str, str], requests: Sequence[Request], stats: Sequence[StepStats]) -> None:
    drafts = [each.draft_tokens for each in stats]
    assert (sum(drafts) > 0) == (chosen["proposer"] != "autoregressive")
    assert max(drafts) <= 2 or chosen["draft_length"] == "fixed"
    assert (sum(len(each.transfers) for each in stats) > 0) == (chosen["topology"] == "disaggregated")
    if chosen["topology"] != "colocated":  # half of the requests may fit into a worker, and have no start in common
        assert len({each.worker for each in stats}) == 2
        return
    copied = sum(each.copied_blocks for each in stats)
    forks = chosen["samples"] != "1" and chosen["batching"] != "static"
    forks = forks and chosen["kv_cache"] in ("paged", "contiguous")
    assert (copied > 0) == forks
    found = sum(sum(each.cached_prompt_tokens.values()) for each in stats)
    assert (found > 0) == (chosen["prefix"] != "off" or forks)
    if chosen["kv_cache"] == "paged" and chosen["batching"] != "static" and not forks:
        assert sum(each.preempted for each in stats) > 0
        assert (sum(each.swapped_in_bytes for each in stats) > 0) == (chosen["preemption"] == "swap")
    ranks: dict[str, Callable[[Request], int]] = {
        "fcfs": lambda each: 0,
        "shortest_first": lambda each: len(each.prompt_token_ids),
        "priority": lambda each: each.priority,
    }
    if (rank := ranks.get(chosen["order"])) is not None:
        joined = dict.fromkeys(request_id for each in stats for request_id in each.scheduled)
        assert list(joined) == [each.request_id for each in sorted(requests, key=rank)]


def _everywhere(target: Engine | Topology, function: Callable[[Any], None]) -> None:
    """In every engine, be it in a process of its own."""
    if isinstance(target, Engine):
        function(target)
    else:
        target.call(function)


def _prepare(engine: Engine) -> None:
    """What is read before it is written is NaN. Drafts have a cost."""
    engine.decoder.calibrate(COSTS)
    for executor in (engine.executor, engine.draft_executor):
        if executor is not None:
            for layer in range(executor.storage.num_layers):
                executor.storage.k(layer).fill_(math.nan)
                executor.storage.v(layer).fill_(math.nan)


def _check_idle(engine: Engine) -> None:
    engine.kv.check_invariants()
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
