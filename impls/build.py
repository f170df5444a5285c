"""Composes an engine from a resolved config. The only place that turns a `_target_` into an object."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from impls.engine import Engine
from impls.kv_cache.host_swap import HostSwap
from impls.kv_cache.storage import KVStorage
from impls.models.llama import LlamaModel
from impls.models.source import ModelSource, open_model
from impls.seams import Arm, Clock, LinearMethod

AXES = ("batching", "kv_cache", "prefix", "decoding", "proposer", "precision", "attention", "execution")
KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EAGER = {"name": "eager", "_target_": "impls.execution.eager.EagerExecutor"}
ALLOWED_PREFIXES = ("impls.", "workloads.", "harness.")


def locate(config: Mapping[str, Any]) -> Any:
    """The class that a config names. ValueError if it lies outside the project: a config is data, not code."""
    target = str(config["_target_"])
    if not target.startswith(ALLOWED_PREFIXES):
        raise ValueError(f"_target_={target} must start with one of {', '.join(ALLOWED_PREFIXES)}")
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def construct(config: Mapping[str, Any], **runtime: Any) -> Any:
    """Instantiate an option: its own keys and what only the running engine knows become keyword arguments."""
    options = {key: value for key, value in config.items() if key not in ("name", "_target_")}
    return locate(config)(**options, **runtime)


def describe_arm(config: Mapping[str, Any], source: ModelSource) -> Arm:
    """What every option's `validate` looks at. ``config`` is one arm's resolved configuration."""
    return Arm(
        axes={group: config[group] for group in AXES} | {"model": config["model"]},
        model=source.shape,
        max_model_len=max_model_len(config, source),
        device=str(config["device"]["name"]),
        kv_budget_bytes=int(config["kv_cache"]["budget_bytes"]),
        element_bytes=KV_DTYPES[kv_dtype_name(config)].itemsize,
    )


def validate_axes(arm: Arm) -> list[str]:
    """Every option's reasons why this arm cannot run; empty if it can."""
    reasons: list[str] = []
    for group in AXES:
        if "_target_" not in arm.axes[group] or (group == "proposer" and not uses_proposer(arm.axes)):
            continue
        reasons += [f"{group}={arm.axes[group]['name']}: {why}" for why in locate(arm.axes[group]).validate(arm)]
    return reasons


def uses_proposer(axes: Mapping[str, Mapping[str, Any]]) -> bool:
    return bool(locate(axes["decoding"]).uses_proposer)


def max_model_len(config: Mapping[str, Any], source: ModelSource) -> int:
    return int(config["model"].get("max_model_len") or source.shape.max_position)


def kv_dtype_name(config: Mapping[str, Any]) -> str:
    """`auto` follows the precision: FP32 arithmetic keeps FP32 keys and values, all else BF16."""
    name = str(config["kv_dtype"]["name"])
    if name == "auto":
        return "fp32" if config["precision"]["name"] == "fp32" else "bf16"
    return name


def build_engine(config: Mapping[str, Any], source: ModelSource, clock: Clock) -> Engine:
    """Weights, cache, scheduler and decoder of one arm, ready for its first request.

    ``config["draft"]`` holds the draft model's `model` and `precision` options, where the proposer needs one.
    """
    device = torch.device(str(config["device"]["name"]))
    shape, length = source.shape, max_model_len(config, source)
    dtype = KV_DTYPES[kv_dtype_name(config)]
    proposer = draft_source = None
    if uses_proposer(config):
        proposer = construct(config["proposer"], vocab_size=shape.vocab_size, shape=shape)
        if proposer.needs_draft_model:
            draft_source = open_model(config["draft"]["model"])
    kv_bytes = shape.kv_bytes_per_token(dtype.itemsize)
    if draft_source is not None:
        kv_bytes += draft_source.shape.kv_bytes_per_token(dtype.itemsize)
    cache = {key: value for key, value in config["kv_cache"].items() if key != "budget"}
    kv = construct(cache, bytes_per_token=kv_bytes, max_model_len=length)
    if "_target_" in config["prefix"]:
        kv.share_prefixes(construct(config["prefix"], block_size=kv.block_size))

    storages: list[KVStorage] = []

    def executor_for(model_source: ModelSource, method: LinearMethod, execution: Mapping[str, Any]) -> tuple[Any, int]:
        s = model_source.shape
        model = LlamaModel(s, model_source.weights(), method, device)
        storage = KVStorage(s.num_layers, kv.num_blocks, kv.block_size, s.num_kv_heads, s.head_dim, dtype, device)
        storage.make_resident()
        storages.append(storage)
        attention = construct(config["attention"], shape=s, device=device)
        runner = construct(execution, model=model, attention=attention, storage=storage, device=device, clock=clock)
        return runner, model.weights_bytes

    method = construct(config["precision"], device=device)
    executor, weights_bytes = executor_for(source, method, config["execution"])
    draft_executor = None
    if draft_source is not None:
        draft_method = construct(config["draft"]["precision"], device=device)
        draft_executor, draft_bytes = executor_for(draft_source, draft_method, EAGER)
        weights_bytes += draft_bytes
    return Engine(
        scheduler=construct(config["batching"], kv=kv, max_model_len=length),
        kv=kv,
        executor=executor,
        decoder=construct(config["decoding"], vocab_size=shape.vocab_size),
        proposer=proposer,
        draft_executor=draft_executor,
        clock=clock,
        device=device,
        eos_token_ids=source.eos_token_ids,
        max_model_len=length,
        weights_bytes=weights_bytes,
        swap=HostSwap(storages, device),
    )
