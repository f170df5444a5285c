"""Composes an engine from a resolved config. The only place that turns a `_target_` into an object."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from impls.engine import Engine
from impls.kv_cache.host_swap import HostSwap
from impls.kv_cache.storage import KVStorage
from impls.models.calibration import calibration_texts
from impls.models.llama import LlamaModel
from impls.models.packed_cache import packed_cache
from impls.models.source import ModelSource, open_model
from impls.seams import Arm, Clock, DraftResources, ForeignTarget, KVCacheManager, Topology
from impls.topology.held_blocks import holding

AXES = ("batching", "kv_cache", "prefix", "decoding", "proposer", "precision", "attention", "execution")
KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
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
    return locate(config)(**options_of(config), **runtime)


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Its constructor's keyword arguments."""
    return {key: value for key, value in config.items() if key not in ("name", "_target_")}


def describe_arm(config: Mapping[str, Any], source: ModelSource) -> Arm:
    """What every option's `validate` looks at. ``config`` is one arm's resolved configuration."""
    return Arm(
        axes={group: config[group] for group in (*AXES, "topology", "target", "model") if group in config},
        model=source.shape,
        max_model_len=max_model_len(config, source),
        device=str(config["device"]["name"]),
        kv_budget_bytes=int(config["kv_cache"]["budget_bytes"]),
        element_bytes=KV_DTYPES[kv_dtype_name(config)].itemsize,
        stored_types=source.stored_types,
    )


def validate_axes(arm: Arm) -> list[str]:
    """Every option's reasons why this arm cannot run; empty if it can."""
    reasons: list[str] = []
    groups: tuple[str, ...] = AXES
    if is_foreign(arm.axes):  # it decides the other axes itself, and says which of their options it stands for
        groups = ("target", "batching", "kv_cache")
    for group in groups:
        if "_target_" not in arm.axes[group] or (group == "proposer" and not uses_proposer(arm.axes)):
            continue
        reasons += [f"{group}={arm.axes[group]['name']}: {why}" for why in locate(arm.axes[group]).validate(arm)]
    if arm.element_bytes == 1 and "attention" in groups and locate(arm.axes["attention"]).reads_scaled is None:
        reasons.append(f"attention={arm.axes['attention']['name']}: cannot read 8-bit keys and values (kv_dtype)")
    return reasons


def is_foreign(axes: Mapping[str, Mapping[str, Any]]) -> bool:
    """Is the target something else than an engine composed of the axes?"""
    return "_target_" in axes.get("target", {})


def uses_proposer(axes: Mapping[str, Mapping[str, Any]]) -> bool:
    return bool(locate(axes["decoding"]).uses_proposer)


def max_model_len(config: Mapping[str, Any], source: ModelSource) -> int:
    """As configured; the model's own where it is not."""
    return int(config["model"].get("max_model_len") or source.shape.max_position)


def kv_dtype_name(config: Mapping[str, Any]) -> str:
    """`auto` follows the precision: FP32 arithmetic keeps FP32 keys and values, all else BF16."""
    name = str(config["kv_dtype"]["name"])
    if name == "auto":
        return "fp32" if config["precision"]["name"] == "fp32" else "bf16"
    return name


def has_workers(config: Mapping[str, Any]) -> bool:
    """Does the arm run its engines in processes of their own?"""
    return "_target_" in config.get("topology", {})


def worker_configs(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The config of every engine that the arm will have, by its worker's name; of a single one, under no name."""
    if not has_workers(config):
        return {"": config}
    return dict(locate(config["topology"]).worker_configs(config))


def build_target(config: Mapping[str, Any], source: ModelSource, clock: Clock) -> Engine | Topology | ForeignTarget:
    """What one arm drives, ready for its first request; arguments as those of `build_engine`."""
    if has_workers(config) and not is_foreign(config):
        workers: Topology = construct(
            config["topology"],
            arm=config,
            builder=WorkerBuilder(),
            clock=clock,
            max_model_len=max_model_len(config, source),
        )
        return workers
    if not is_foreign(config):
        return build_engine(config, source, clock)
    length, device = max_model_len(config, source), torch.device(str(config["device"]["name"]))
    dtype = construct(config["precision"], device=device).activation_dtype  # what our own layers compute in here
    cache = {key: value for key, value in config["kv_cache"].items() if key != "budget"}
    foreign = construct(config["target"])
    cache |= foreign.cache_options(config)
    kv_bytes = source.shape.kv_bytes_per_token(dtype.itemsize)
    kv = construct(cache, bytes_per_token=kv_bytes, max_model_len=length)
    target: ForeignTarget = foreign.build(
        source=source,
        axes=config,
        scheduler=construct(config["batching"], kv=kv, max_model_len=length),
        kv=kv,
        clock=clock,
        device=device,
        dtype=dtype,
        max_model_len=length,
    )
    return target


class WorkerBuilder:
    """The `EngineBuilder` that worker processes use: this module's functions, each opening the model itself."""

    def cache(self, config: Mapping[str, Any]) -> KVCacheManager:
        return build_cache(config, open_model(config["model"]))

    def storage_bytes(self, config: Mapping[str, Any]) -> int:
        return KVStorage.bytes_needed(*self._storage_shape(config))

    def storage(self, config: Mapping[str, Any], memory: Tensor) -> KVStorage:
        return KVStorage(*self._storage_shape(config), memory.device, memory)

    def fingerprint(self, config: Mapping[str, Any]) -> str:
        models = [config["model"], *([config["draft"]["model"]] if "draft" in config else [])]
        return " and ".join(open_model(model).fingerprint for model in models)

    def engine(self, config: Mapping[str, Any], clock: Clock, memory: Tensor | None) -> Engine:
        return build_engine(config, open_model(config["model"]), clock, memory)

    def _storage_shape(self, config: Mapping[str, Any]) -> tuple[int, int, int, int, int, torch.dtype]:
        s, kv = open_model(config["model"]).shape, self.cache(config)
        dtype = KV_DTYPES[kv_dtype_name(config)]
        return s.num_layers, kv.num_blocks, kv.block_size, s.num_kv_heads, s.head_dim, dtype


def build_cache(config: Mapping[str, Any], source: ModelSource, *, holds: bool = False) -> KVCacheManager:
    """What the KV budget buys. ``holds``: with `HeldBlocks`."""
    size = KV_DTYPES[kv_dtype_name(config)].itemsize
    shapes = [source.shape]
    if uses_proposer(config) and locate(config["proposer"]).needs_draft_model:
        shapes.append(open_model(config["draft"]["model"]).shape)
    drafting = 0
    if uses_proposer(config):
        drafting = locate(config["proposer"]).kv_bytes_per_token(source.shape, size)
    manager: Any = locate(config["kv_cache"])
    kv: KVCacheManager = (holding(manager) if holds else manager)(
        **{key: value for key, value in options_of(config["kv_cache"]).items() if key != "budget"},
        bytes_per_token=sum(shape.kv_bytes_per_token(size) for shape in shapes) + drafting,
        max_model_len=max_model_len(config, source),
    )
    if "_target_" in config["prefix"]:
        kv.share_prefixes(construct(config["prefix"], block_size=kv.block_size))
    return kv


def build_engine(
    config: Mapping[str, Any], source: ModelSource, clock: Clock, memory: Tensor | None = None
) -> Engine:
    """Weights, cache, scheduler and decoder of one arm, ready for its first request.

    ``config["draft"]`` holds the draft model's `model` and `precision` options, where the proposer needs one.
    ``memory``: where the keys and values are to lie, for others to read; its cache then can hold blocks (`HeldBlocks`).
    """
    device = torch.device(str(config["device"]["name"]))
    shape, length = source.shape, max_model_len(config, source)
    dtype = KV_DTYPES[kv_dtype_name(config)]
    proposer = draft_source = None
    if uses_proposer(config):
        proposer = construct(config["proposer"], vocab_size=shape.vocab_size, shape=shape)
        if proposer.needs_draft_model:
            draft_source = open_model(config["draft"]["model"])
    kv = build_cache(config, source, holds=memory is not None)
    storages: list[KVStorage] = []

    def executor_for(model_source: ModelSource, precision: Mapping[str, Any]) -> tuple[Any, int]:
        s, method = model_source.shape, construct(precision, device=device)
        tokens = method.calibration_tokens
        texts = calibration_texts(model_source.tokenizer, s.vocab_size, tokens) if tokens else ()
        kept = packed_cache(model_source.fingerprint, method, options_of(precision), texts) if texts else None
        model = LlamaModel(s, model_source.weights(), method, device, texts, kept)
        own = None if storages else memory  # the target's, which comes first
        storage = KVStorage(s.num_layers, kv.num_blocks, kv.block_size, s.num_kv_heads, s.head_dim, dtype, device, own)
        storage.make_resident()
        storages.append(storage)
        attention = construct(config["attention"], shape=s, device=device)
        launch = config["execution"]
        runner = construct(launch, model=model, attention=attention, storage=storage, device=device, clock=clock)
        return runner, model.weights_bytes

    executor, weights_bytes = executor_for(source, config["precision"])
    draft_executor = None
    if draft_source is not None:
        draft_executor, draft_bytes = executor_for(draft_source, config["draft"]["precision"])
        weights_bytes += draft_bytes

    def layer_of(num_kv_heads: int, head_dim: int, own: torch.dtype | None) -> KVStorage:
        layer = KVStorage(1, kv.num_blocks, kv.block_size, num_kv_heads, head_dim, own or dtype, device)
        layer.make_resident()
        storages.append(layer)
        return layer

    if proposer is not None:
        weights_bytes += proposer.attach(
            DraftResources(
                model=executor.model,
                weights=source.weights(),
                fingerprint=source.fingerprint,
                attention=lambda head: construct(config["attention"], shape=head, device=device),
                storage=layer_of,
                kv_dtype=dtype,
                device=device,
            )
        )
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
        swap=HostSwap(storages, device, waits=not executor.overlap),
    )
