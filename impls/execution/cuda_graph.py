"""Decode steps recorded once as CUDA graphs and replayed: the host launches one graph, not hundreds of kernels."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from impls.execution.eager import EagerExecutor, LayerStorage
from impls.seams import Arm, AttentionBackend, CausalLM, Clock, StepBatch


class CudaGraphExecutor(EagerExecutor):
    """Replays single-token decode steps, padded to the next bucket; every other step runs eagerly.

    Graphs are captured from the largest bucket down, so that the smaller ones fit in the memory pool of the first.
    What a graph reads lies in `DecodeBuffers`, whose addresses and strides never change. The LM head stays outside: it
    runs on the wanted rows only, and logits inside would cost their memory once for every bucket.
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
        super().__init__(
            model=model, attention=attention, storage=storage, device=device, clock=clock, overlap=overlap
        )
        self._buffers: DecodeBuffers | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._hidden = torch.empty(0)

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        if arm.device != "cuda":
            return ["needs CUDA"]
        attention = arm.axes.get("attention", {}).get("name")
        if attention != "triton":
            return [f"needs attention=triton: attention={attention} plans its calls on the host, step by step"]
        return super().validate(arm)

    def warm_up(self, max_num_seqs: int) -> None:
        longest = min(-(-self.model.shape.max_position // self.storage.block_size), self.storage.num_blocks)
        buffers = DecodeBuffers(decode_buckets(max_num_seqs), longest, self.storage.block_size, self.device)
        pool = None
        with torch.inference_mode():
            self._hidden = torch.empty_like(self._forward(buffers.view(buffers.buckets[-1])))
            for bucket in reversed(buffers.buckets):
                batch = buffers.view(bucket)
                self._forward(batch)  # compiles kernels and allocates workspaces, which a capture cannot
                torch.cuda.synchronize(self.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._hidden[:bucket] = self._forward(batch)
                pool = graph.pool()
                self._graphs[bucket] = graph
        self._buffers = buffers

    def _forward(self, batch: StepBatch, num_layers: int | None = None) -> Tensor:
        bucket = None if num_layers is not None or self._buffers is None else self._buffers.load(batch)
        if bucket is None:
            return super()._forward(batch, num_layers)
        self._graphs[bucket].replay()
        return self._hidden[: batch.num_rows].clone()  # the next replay overwrites it


def decode_buckets(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 16; the largest is ``max_num_seqs`` itself."""
    sizes = itertools.chain((1, 2, 4, 8), itertools.count(16, 16))
    below = list(itertools.takewhile(lambda size: size < max_num_seqs, sizes))
    return [*below, max_num_seqs]


class DecodeBuffers:
    """A decode step's tensors at fixed addresses, for the largest bucket; a bucket uses their first rows.

    A padded row is a sequence of length 0 whose key goes to slot -1: it stores nothing and attends to nothing.
    """

    def __init__(self, buckets: list[int], max_blocks: int, block_size: int, device: torch.device) -> None:
        """buckets: ascending. max_blocks: the longest block table that a sequence can have."""
        self.buckets, self.block_size = buckets, block_size
        size = buckets[-1]

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input_ids, self.positions = zeros(size), zeros(size)
        self.slot_mapping = zeros(size) - 1
        self.query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.seq_lens = zeros(size, dtype=torch.int32)
        self.block_table = zeros(size, max_blocks, dtype=torch.int32)
        self.logits_indices = torch.arange(size, device=device)

    def view(self, bucket: int) -> StepBatch:
        """The step that a graph of this bucket runs. Host lengths are those of a full bucket, as captured."""
        return StepBatch(
            input_ids=self.input_ids[:bucket],
            positions=self.positions[:bucket],
            slot_mapping=self.slot_mapping[:bucket],
            query_start=self.query_start[: bucket + 1],
            seq_lens=self.seq_lens[:bucket],
            block_table=self.block_table[:bucket],
            logits_indices=self.logits_indices[:bucket],
            query_lens=[1] * bucket,
            kv_lens=[1] * bucket,
            block_size=self.block_size,
        )

    def load(self, batch: StepBatch) -> int | None:
        """Copy a single-token decode step in and pad it; its bucket, or None if no graph can run this step."""
        count, width = batch.block_table.shape
        if set(batch.query_lens) != {1} or count > self.buckets[-1] or width > self.block_table.shape[1]:
            return None
        bucket = next(size for size in self.buckets if size >= count)
        self.input_ids[:count] = batch.input_ids
        self.positions[:count] = batch.positions
        self.slot_mapping[:count] = batch.slot_mapping
        self.seq_lens[:count] = batch.seq_lens
        self.block_table[:count, :width] = batch.block_table
        self.slot_mapping[count:bucket] = -1
        self.seq_lens[count:bucket] = 0
        self.input_ids[count:bucket] = 0
        self.positions[count:bucket] = 0
        return bucket
