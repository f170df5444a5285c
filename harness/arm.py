"""One arm's configuration: `auto` and relative values settled once a study, then asked whether it can run."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from harness.errors import BadInput, not_allowed
from harness.gpus import devices_of
from harness.limits import does_not_fit, memory_free_bytes
from impls.attention.auto import resolve_attention
from impls.build import (
    describe_arm,
    has_workers,
    is_foreign,
    locate,
    max_model_len,
    options_of,
    uses_proposer,
    validate_axes,
    worker_configs,
)
from impls.models.source import ModelSource, open_model
from impls.seams import ModelShape

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def resolve_study(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every arm with its device, its attention backend and its KV budget in bytes settled.

    The free memory is read once, so that a fraction gives all arms of a study the same bytes.
    """
    free: dict[str, int] = {}
    resolved: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        arm = copy.deepcopy(dict(config))
        arm["device"] = {**arm["device"], "name": resolve_device(str(arm["device"]["name"]))}
        device = arm["device"]["name"]
        if arm["attention"]["name"] == "auto":
            foreign = {"name": arm["target"]["name"]} if is_foreign(arm) else None  # its kernels are its own affair
            arm["attention"] = foreign or option("attention", resolve_attention(device))
        if device not in free:
            free[device] = memory_free_bytes(device)
        source = open_model(arm["model"])
        arm["workload"] = readable_traffic(arm["workload"], source)
        kv_cache = dict(arm["kv_cache"])
        kv_cache["budget_bytes"] = budget_bytes(kv_cache.pop("budget"), source, free[device])
        arm["kv_cache"] = kv_cache
        if draft := draft_options(arm):
            arm["draft"] = draft
        arm["topology"] = own_policies(arm["topology"])
        resolved[name] = arm
    return resolved


def resolve_device(name: str) -> str:
    """`auto` is the GPU where there is one. BadInput if `cuda` is asked for and there is none."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device=cuda: torch sees no CUDA device here; allowed: auto, cpu")
    return name


def readable_traffic(workload: Mapping[str, Any], source: ModelSource) -> dict[str, Any]:
    """Synthetic weights have no tokenizer: natural prompts become random tokens of the same lengths, and say so."""
    prompts = workload.get("prompts")
    if source.tokenizer is not None or prompts is None or prompts.get("law", prompts["name"]) != "natural":
        return dict(workload)
    note = f"{workload['source']}; random tokens, as {source.name} has no tokenizer"
    return {**workload, "prompts": option("workload/prompts", "random"), "source": note}


def draft_options(arm: Mapping[str, Any]) -> dict[str, Any] | None:
    """The draft model's own options, where its proposer runs one; ``proposer.model`` null is the target itself."""
    proposer = arm["proposer"]
    if not uses_proposer(arm) or not locate(proposer).needs_draft_model:
        return None
    model = option("model", str(proposer["model"])) if proposer["model"] else dict(arm["model"])
    return {"model": model, "precision": option("precision", str(proposer["precision"]))}


def own_policies(topology: Mapping[str, Any]) -> dict[str, Any]:
    """A topology's options, with the batching policy that a role of its workers names in full."""
    settled = dict(topology)
    for role, options in topology.items():
        if isinstance(options, Mapping) and options.get("batching") is not None:
            settled[role] = {**options, "batching": option("batching", str(options["batching"]))}
    return settled


def option(group: str, name: str) -> dict[str, Any]:
    """An option as conf/ defines it. BadInput if there is none of that name."""
    path = CONF_DIR / group / f"{name}.yaml"
    if not path.is_file():
        raise not_allowed(group, name, [other.stem for other in path.parent.glob("*.yaml")])
    loaded = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def budget_bytes(budget: Any, source: ModelSource, free_bytes: int) -> int:
    """Bytes of KV cache from bytes (`500000000`, `2GiB`), a fraction of free memory (`0.25`) or tokens (`3072tokens`).

    Tokens are counted at the model's BF16 K/V size, whatever the arm's own type: equal bytes for all arms.
    """
    allowed = "allowed: bytes (2GiB), a fraction of free memory between 0 and 1, or <n>tokens"
    text = str(budget).strip()
    if match := re.fullmatch(r"(\d+)\s*tokens?", text):
        size = int(match[1]) * source.shape.kv_bytes_per_token(2)
    elif match := re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([KMG]i?B|B|)", text):
        number = float(match[1])
        fraction = not match[2] and 0 < number < 1
        bought = number * (free_bytes if fraction else UNITS[match[2]])
        size = int(bought) if math.isfinite(bought) else 0
    else:
        raise BadInput(f"kv_cache.budget={budget}: not understood; {allowed}")
    if size <= 0:
        raise BadInput(f"kv_cache.budget={budget}: buys nothing that a machine has; {allowed}")
    return size


def model_fingerprints(config: Mapping[str, Any]) -> dict[str, str]:
    """Of a (resolved) arm's model and its draft model, where it has one: what a resumed study must find unchanged."""
    models = {"model": config["model"]} | ({"draft": config["draft"]["model"]} if "draft" in config else {})
    return {role: open_model(model).fingerprint for role, model in models.items()}


def weight_bits(precision: Mapping[str, Any]) -> float:
    """Of a layer, by the method that this option names."""
    return float(locate(precision).weight_bits(options_of(precision)))


def _impossible_shape(shape: ModelShape) -> list[str]:
    reasons = []
    if shape.num_heads % shape.num_kv_heads:
        reasons.append(f"model: num_heads={shape.num_heads} is no multiple of num_kv_heads={shape.num_kv_heads}")
    if shape.head_dim % 2:
        reasons.append(f"model: head_dim={shape.head_dim} is odd, but rotary embedding turns pairs")
    return reasons


def validate_arm(config: Mapping[str, Any]) -> list[str]:
    """Reasons why this (resolved) arm cannot run here; empty if it can."""
    source = open_model(config["model"])
    draft = open_model(config["draft"]["model"]) if "draft" in config else None
    length = max_model_len(config, source)
    if reasons := _impossible_shape(source.shape):
        return reasons
    if length > source.shape.max_position:
        reasons.append(f"model.max_model_len={length} is above the model's own {source.shape.max_position}")
    if draft is not None and draft.shape.vocab_size != source.shape.vocab_size:
        sizes = f"{draft.shape.vocab_size} tokens, the target {source.shape.vocab_size}"
        reasons.append(f"proposer.model={draft.name} has a vocabulary of {sizes}: must be the same")
    drafts = locate(config["proposer"]) if uses_proposer(config) and not is_foreign(config) else None
    if has_workers(config):
        topology, whole = config["topology"], describe_arm(config, source)
        whys = locate(topology).validate(whole)
        if drafts is not None:  # a worker's own arm does not tell that there are others
            reasons += [f"proposer={config['proposer']['name']}: {why}" for why in drafts.validate(whole)]
        if whys:  # without them there is no telling what each worker would be
            return reasons + [f"topology={topology['name']}: {why}" for why in whys]
    models = [(source.shape, weight_bits(config["precision"]))]
    if draft is not None:
        chosen = config["draft"]["precision"]
        models.append((draft.shape, weight_bits(chosen)))
        theirs = describe_arm({**config, "precision": chosen, "model": config["draft"]["model"]}, draft)
        reasons += [f"proposer.precision={chosen['name']}: {why}" for why in locate(chosen).validate(theirs)]
    workers = worker_configs(config)
    for worker in workers.values():
        arm = describe_arm(worker, source)
        # What drafting keeps lies in the same blocks, so that the target's K/V is only a part of the budget.
        own, extra = source.shape.kv_bytes_per_token(arm.element_bytes), 0
        if draft is not None:
            extra += draft.shape.kv_bytes_per_token(arm.element_bytes)
        if drafts is not None:
            extra += drafts.kv_bytes_per_token(source.shape, arm.element_bytes)
        arm = replace(arm, kv_budget_bytes=arm.kv_budget_bytes * own // (own + extra))
        reasons += [why for why in validate_axes(arm) if why not in reasons]
    rows = int(config["batching"].get("max_num_batched_tokens") or max(2048, length))
    heads = 0 if drafts is None else drafts.expected_weights_bytes(describe_arm(config, source))
    # Quality is measured beside the same model in BF16, where the arm's own is an engine of the trial's process.
    is_compared = bool(config.get("quality_tokens")) and not has_workers(config) and not is_foreign(config)
    reference = [(source.shape, weight_bits(option("precision", "bf16")))] if is_compared else []
    devices = devices_of(config)
    for device in dict.fromkeys(devices.values()):
        here = [worker for name, worker in workers.items() if devices.get(name) == device]  # not on other hosts
        budget = sum(int(worker["kv_cache"]["budget_bytes"]) for worker in here)
        lacking = does_not_fit(models * len(here) + reference, budget, rows, device, heads * len(here))
        if lacking and reference:
            lacking += ", with the BF16 model that quality_tokens compares with"
        if lacking and lacking not in reasons:
            reasons.append(lacking)
    return reasons
