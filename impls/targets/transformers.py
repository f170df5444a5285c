"""Hugging Face transformers in this process, with our weights: what users would pick instead of an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from impls.models.source import ModelSource
from impls.seams import Arm, Clock, ForeignTarget, KVCacheManager, ModelShape, Scheduler
from impls.targets.pages import FAST_PAGE, is_flash

OLDEST = (5, 24)  # where continuous batching has the interface that is used here
INSTALL = "pip install 'llm-serving-harness[transformers]'"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Batching -> what of the library it is, and the options of the axes that this decides.
DOES: Mapping[str, tuple[str, Mapping[str, Sequence[str]]]] = {
    "static": ("generate", {"kv_cache": ("contiguous",), "prefix": ("off",)}),
    **dict.fromkeys(
        ("continuous", "chunked_prefill"),
        ("its continuous batching", {"kv_cache": ("paged",), "prefix": ("off", "hash_chain")}),
    ),
}
ALWAYS: Mapping[str, Sequence[str]] = {
    "decoding": ("autoregressive",),
    "precision": tuple(DTYPES),
    "attention": ("auto",),  # resolved to the target's own name: its kernels are its own choice
    "execution": ("eager",),
    "topology": ("colocated",),
}
# Of continuous batching's options these are the library's own affair.
FIXED_BATCHING = {"preemption": "recompute", "order": "fcfs", "watermark": 0.0}


@dataclass(frozen=True)
class Transformers:
    """`batching=static` is `generate`; `continuous` and `chunked_prefill` are its continuous batching, which splits a
    prompt where a step has no room for all of it. Every other axis must say what the library really does, or the arm
    does not run: nothing that was asked for is ignored.

    `precision=bf16` rounds the weights to BF16. On a device that multiplies BF16 everything is computed and kept in it;
    elsewhere, where BF16 makes the library's prefill four times as long, weights, activations, keys and values are in
    FP32, as our own activations are. The KV budget is in bytes: it holds half as many positions in FP32.

    `target.attn_implementation` names its attention as the library does; null: its own choice. Of FlashAttention its
    continuous batching has a kernel for decodes, which takes pages of `FAST_PAGE` positions: it gets them then.
    """

    attn_implementation: str | None = None

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        missing = why_not_installed()
        if missing:
            return [missing]
        batching = arm.axes["batching"]
        if batching["name"] not in DOES:
            return [f"batching={batching['name']}: transformers has none such; allowed: {', '.join(DOES)}"]
        what, decided = DOES[batching["name"]]
        reasons = []
        for group, allowed in {**ALWAYS, **decided}.items():
            chosen = arm.axes[group]["name"] if group in arm.axes else allowed[0]
            if chosen not in allowed and not (group == "attention" and chosen == "transformers"):
                reasons.append(
                    f"{group}={chosen}: with batching={batching['name']} this is {what} of transformers, which stands "
                    f"for {group}={' or '.join(allowed)} only"
                )
        if not reasons and DTYPES[arm.axes["precision"]["name"]].itemsize != arm.element_bytes:
            reasons.append("kv_dtype: transformers keeps keys and values in its precision; allowed: auto")
        for option, only in FIXED_BATCHING.items():
            if batching.get(option, only) != only:
                reasons.append(f"batching.{option}={batching[option]}: transformers sees to it; allowed: {only}")
        attn = arm.axes.get("target", {}).get("attn_implementation")
        if is_flash(attn) and (arm.device != "cuda" or arm.axes["precision"]["name"] != "bf16"):
            reasons.append(f"target.attn_implementation={attn}: needs device=cuda and precision=bf16")
        if batching["name"] != "static" and int(arm.axes["kv_cache"].get("block_size", 16)) < 4:
            reasons.append("kv_cache.block_size: transformers has no pages of fewer than 4 positions; nearest: 4")
        return reasons + impossible(arm.model)

    def cache_options(self, axes: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """Of `kv_cache`, what it needs otherwise than the arm has it; the record names its pages."""
        paged = axes["batching"]["name"] != "static" and is_flash(self.attn_implementation)
        return {"block_size": FAST_PAGE} if paged and int(axes["kv_cache"]["block_size"]) % FAST_PAGE else {}

    def build(
        self,
        *,
        source: ModelSource,
        axes: Mapping[str, Mapping[str, Any]],
        scheduler: Scheduler,
        kv: KVCacheManager,
        clock: Clock,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
    ) -> ForeignTarget:
        """The target of a valid arm. ``scheduler`` and ``kv`` are built from its options: `generate` is scheduled by
        the one, continuous batching is given the limits of both. ``dtype``: what it computes in."""
        from impls.targets.causal_lm import causal_lm  # the library takes seconds to import
        from impls.targets.continuous import ContinuousBatchingTarget
        from impls.targets.generate import GenerateTarget

        weights: Mapping[str, Tensor] = source.weights()
        rounding = DTYPES[axes["precision"]["name"]]
        model = causal_lm(source.shape, weights, rounding, device, dtype, self.attn_implementation)
        if axes["batching"]["name"] == "static":
            return GenerateTarget(
                model=model,
                scheduler=scheduler,
                kv=kv,
                clock=clock,
                device=device,
                eos_token_ids=source.eos_token_ids,
                max_model_len=max_model_len,
            )
        return ContinuousBatchingTarget(
            model=model,
            kv=kv,
            clock=clock,
            eos_token_ids=source.eos_token_ids,
            max_model_len=max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            share_prefixes=axes["prefix"]["name"] == "hash_chain",
        )


def why_not_installed() -> str | None:
    """None if the library is there and new enough."""
    oldest = ".".join(map(str, OLDEST))
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return f"needs the package transformers, at least {oldest}: {INSTALL}"
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    return None if numbers >= OLDEST else f"needs transformers of at least {oldest}, has {found}: {INSTALL}"


def impossible(shape: ModelShape) -> list[str]:
    """Shapes that the library's own classes refuse."""
    reasons, width, heads = [], shape.hidden_size, shape.num_heads
    if width % heads:
        reasons.append(f"model: transformers wants hidden_size ({width}) to be a multiple of num_heads ({heads})")
    if shape.qk_norm and shape.mlp_bias:
        reasons.append("model: transformers has no model with normed queries and keys and biases in its MLP")
    return reasons
