"""Engines of any arm for tests: real configs from conf/, one model in memory for all of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import yaml

import impls.build
from harness.arm import draft_options, option
from harness.drive import RealClock
from impls.engine import Engine
from impls.models.source import ModelSource
from impls.request import Request, SamplingParams
from impls.seams import StepResult, Topology

CONF = Path(__file__).parents[2] / "conf"
SILENT_S = 240.0  # a worker may compile
GROUPS = (
    "model", "batching", "kv_cache", "prefix", "kv_dtype", "decoding", "proposer", "precision", "attention", "execution"
)


def arm_config(*, budget_tokens: int, source: ModelSource, max_model_len: int, **choices) -> dict:
    """A resolved arm: ``choices`` name an option of a group, or give (name, {key: value}) to change its keys."""
    defaults = {
        "model": "smollm2_135m", "batching": "continuous", "kv_cache": "paged", "prefix": "off", "kv_dtype": "auto",
        "decoding": "autoregressive", "proposer": "ngram", "precision": "fp32", "attention": "sdpa",
        "execution": "eager",
    }
    config = {}
    for group in GROUPS:
        choice = choices.get(group, defaults[group])
        name, changes = choice if isinstance(choice, tuple) else (choice, {})
        config[group] = copy.deepcopy(option(group, name)) | changes
    config["model"]["max_model_len"] = max_model_len
    config["device"] = {"name": "cpu"}
    element = impls.build.KV_DTYPES[impls.build.kv_dtype_name(config)].itemsize
    config["kv_cache"].pop("budget", None)
    config["kv_cache"]["budget_bytes"] = budget_tokens * source.shape.kv_bytes_per_token(element)
    if draft := draft_options(config):
        config["draft"] = draft
        config["kv_cache"]["budget_bytes"] *= 2  # the draft's layers lie in the same blocks
    return config


def build(config: dict, source: ModelSource, clock=None) -> Engine:
    return impls.build.build_engine(config, source, clock or RealClock())


def request(request_id: str, prompt: Sequence[int], max_tokens: int, **sampling) -> Request:
    return Request(request_id, tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling))


def run(
    engine: Engine | Topology, requests: Sequence[Request], max_steps: int = 5000
) -> tuple[dict[str, list[int]], list[StepResult]]:
    """Everything submitted at once, stepped to the end; output tokens by request, and all steps. AssertionError if a
    worker is silent for `SILENT_S`."""
    one = isinstance(engine, Engine)
    for each in requests:
        engine.add_request(each)
    outputs: dict[str, list[int]] = {each.request_id: [] for each in requests}
    results = []
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs, results
        result = engine.step(math.inf if one else engine.clock.now() + SILENT_S)
        assert one or result.stats or result.emissions, "a worker hangs"
        results.append(result)
        for emission in result.emissions:
            outputs[emission.request_id] += emission.token_ids
        if one:
            engine.kv.check_invariants()
    raise AssertionError(f"not done after {max_steps} steps")


def load(name: str) -> dict:
    return yaml.safe_load((CONF / f"{name}.yaml").read_text())
