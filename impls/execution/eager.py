"""One operator after another, as written. The norm that compiled and captured steps must match."""

from __future__ import annotations

import torch
from torch import Tensor

from impls.execution.largest_step import largest_step
from impls.execution.overlap import overlap_reasons
from impls.seams import (
    Arm,
    AttentionBackend,
    CausalLM,
    Clock,
    Executor,
    LayerAttention,
    LayerStorage,
    StepBatch,
    StepLimits,
)


class EagerExecutor(Executor):
    """Stores each layer's keys and values, then attends: the step's own rows are in the cache when they are read.

    ``attention_s`` is known with a ``clock`` and on a CPU only: kernels on CUDA run after the call that launches them.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        attention: AttentionBackend,
        storage: LayerStorage,
        device: torch.device,
        clock: Clock | None = None,
        overlap: str = "off",
    ) -> None:
        """overlap: "on" lets the engine prepare a step while the one before it runs (`StepQueue`)."""
        self.model, self.attention, self.storage, self.device = model, attention, storage, device
        self.overlap = overlap == "on"
        self._clock = clock if device.type == "cpu" else None
        self._seconds_in_attention = 0.0

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return overlap_reasons(arm, arm.axes.get("execution", {}).get("overlap", "off"))

    def warm_up(self, limits: StepLimits) -> None:
        """On CUDA the largest step is run once: what it allocates, what kernels it loads and whether it fits at all
        belong to no request. On a CPU nothing of it would outlast it."""
        if self.device.type == "cuda":
            storage = self.storage
            self.execute(largest_step(limits, storage.num_blocks, storage.block_size, self.device))

    def execute(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        self._seconds_in_attention = 0.0
        with torch.inference_mode():
            found = self._run(batch)
        self.attention_s = None if self._clock is None else self._seconds_in_attention
        return found

    def draft(self, batch: StepBatch, num_layers: int | None = None) -> Tensor:
        """FP32 logits [R, vocab] after only the first ``num_layers`` layers (None: all), final norm and head."""
        with torch.inference_mode():
            return self._run(batch, num_layers)[0]

    def _run(self, batch: StepBatch, num_layers: int | None = None) -> tuple[Tensor, Tensor]:
        hidden = self._forward(batch, num_layers)
        if len(batch.logits_indices) == 0:  # only parts of prompts: not every kernel takes no rows
            return hidden.new_empty((0, self.model.shape.vocab_size), dtype=torch.float32), hidden
        return self.model.logits(hidden[batch.logits_indices]), hidden

    def _forward(self, batch: StepBatch, num_layers: int | None = None) -> Tensor:
        """Final-normed hidden states [T, hidden]: what a variant launches in its own way."""
        self.attention.prepare(batch)
        return self.model.forward(batch.input_ids, batch.positions, self._attention_of(batch), num_layers)

    def _attention_of(self, batch: StepBatch) -> LayerAttention:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.storage.write(layer, k, v, batch.slot_mapping)
            return self.attention.forward(q, self.storage.k(layer), self.storage.v(layer), layer)

        clock = self._clock
        if clock is None:
            return attend

        def timed(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            start = clock.now()
            attended = attend(layer, q, k, v)
            self._seconds_in_attention += clock.now() - start
            return attended

        return timed
