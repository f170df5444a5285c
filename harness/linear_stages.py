"""What a model's linear layers cost on their own, and how a method splits it into its stages."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from impls.seams import CausalLM, LinearMethod, PackedLinear

ROW_COUNTS = (1, 4, 16, 32)
PASSES = 2
ENOUGH_S = 5.0  # a model whose layers take longer is not timed at more rows: who waits would take it for a hang
STAGES = ("quantize_s", "matmul_s", "rescale_s")  # that a record has, null where a method has no such stage

Record = dict[str, int | float | None]


def row_counts(max_num_seqs: int) -> list[int]:
    """The numbers of rows worth timing for an arm whose decode steps have at most ``max_num_seqs``."""
    return [rows for rows in ROW_COUNTS if rows <= max(1, max_num_seqs)]


@torch.inference_mode()
def linear_stage_times(model: CausalLM, row_counts: Sequence[int]) -> list[Record]:
    """Seconds that one pass through all linear layers takes, head left out: a record per number of rows.

    Keys: rows, apply_s (`LinearMethod.apply`) and <stage>_s of `LinearMethod.stages`, one after the other; `STAGES`
    that a method lacks are null. A kernel that fuses the stages makes apply_s less than their sum. Inputs are random;
    each figure is the better of two passes: what disturbs one adds time. On CUDA the clock waits for the device after
    every stage, so that one of few rows is mostly its launch.
    """
    method, device = model.method, model.method.device
    layers = packed_layers(model, device)
    generator = torch.Generator().manual_seed(0)
    widths = sorted({layer.in_features for layer in layers})
    found: list[Record] = []
    begun = time.perf_counter()
    for rows in row_counts:
        if time.perf_counter() - begun > ENOUGH_S:
            break
        inputs = {k: torch.randn(rows, k, generator=generator).to(device, method.activation_dtype) for k in widths}
        passes = [_one_pass(method, layers, inputs) for _ in range(PASSES)]
        best: Record = {name: min(seen[name] for seen in passes) for name in passes[0]}
        found.append({"rows": rows, **dict.fromkeys(("apply_s", *STAGES)), **best})
    return found


def _one_pass(method: LinearMethod, layers: Sequence[PackedLinear], inputs: Mapping[int, Tensor]) -> dict[str, float]:
    """Seconds of `apply` and of each stage that the method has, summed over the layers."""
    device = method.device

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    for layer in layers:
        method.apply(inputs[layer.in_features], layer)
    seconds = {"apply_s": now() - start}
    stages = method.stages()
    if stages is None:
        return seconds
    seconds |= {f"{name}_s": 0.0 for name in stages}
    for layer in layers:
        passed: Any = inputs[layer.in_features]
        start = now()
        for name, stage in stages.items():
            passed = stage(passed, layer)
            end = now()
            seconds[f"{name}_s"] += end - start
            start = end
    return seconds


def packed_layers(model: CausalLM, device: torch.device) -> list[PackedLinear]:
    """In the order in which a forward pass of one row reaches them."""
    recorder = _RecordingMethod(model.method)
    observed = copy.copy(model)
    observed.method = cast(LinearMethod, recorder)
    one_row = torch.zeros(1, dtype=torch.int64, device=device)
    observed.forward(one_row, one_row, lambda layer, q, k, v: torch.zeros_like(q))
    return recorder.layers


class _RecordingMethod:
    """Stands for a method while its model runs, and notes every layer that it is asked to apply."""

    def __init__(self, method: LinearMethod) -> None:
        self._method, self.layers = method, list[PackedLinear]()
        self.activation_dtype = method.activation_dtype

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        self.layers.append(packed)
        return self._method.apply(x, packed)
