"""Decode steps recorded once as CUDA graphs and replayed: the host launches one graph, not hundreds of kernels."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from impls.execution.eager import EagerExecutor
from impls.seams import Arm, AttentionBackend, CausalLM, Clock, LayerStorage, StepBatch, StepLimits
from impls.upload import upload

MAX_PADDING = 2  # times the rows of a step; beyond that it would wait for products, not for launches


class CudaGraphExecutor(EagerExecutor):
    """Replays steps that decode, with as many rows a sequence as drafts are verified or with one; others run eagerly.

    A step is padded to the next bucket of sequences, and each of these to the rows of the graph. Graphs are captured
    from the largest down, so that the smaller ones fit in the memory pool of the first. What a graph reads lies in
    `DecodeBuffers`, whose addresses and strides never change. The LM head stays outside: it runs on the wanted rows
    only, and logits inside would cost their memory once for every bucket. Steps of the first layers only are no graphs.
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
        self._buffers: list[DecodeBuffers] = []
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by rows a sequence, and sequences
        self._hidden = torch.empty(0)

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        if arm.device != "cuda":
            return ["needs CUDA"]
        attention = arm.axes.get("attention", {}).get("name")
        if attention != "triton":
            return [f"needs attention=triton: attention={attention} plans its calls on the host, step by step"]
        return super().validate(arm)

    def warm_up(self, limits: StepLimits) -> None:
        super().warm_up(limits)
        buffers = self.buffers_for(limits)
        pool = None
        with torch.inference_mode():
            self._hidden = torch.empty_like(self._forward(buffers[-1].view(buffers[-1].buckets[-1])))
            for each in reversed(buffers):
                for bucket in reversed(each.buckets):
                    batch = each.view(bucket)
                    self._forward(batch)  # compiles kernels and allocates workspaces, which a capture cannot
                    torch.cuda.synchronize(self.device)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        self._hidden[: batch.num_rows] = self._forward(batch)
                    pool = graph.pool()
                    self._graphs[each.query_len, bucket] = graph
        self._buffers = buffers

    def buffers_for(self, limits: StepLimits) -> list[DecodeBuffers]:
        """Of every kind of step that is captured, by rows a sequence; their block tables hold any sequence's."""
        size = self.storage.block_size
        blocks = -(-limits.max_model_len // size)
        widest = min(1 << (blocks - 1).bit_length(), self.storage.num_blocks)  # some caches reserve a power of two
        buckets = decode_buckets(limits.max_num_seqs)
        kinds = sorted({1, 1 + limits.num_draft_tokens})
        return [DecodeBuffers(buckets, widest, size, self.device, rows) for rows in kinds]

    def _forward(self, batch: StepBatch, num_layers: int | None = None) -> Tensor:
        self.replayed = False
        for buffers in self._buffers if num_layers is None else ():
            bucket = buffers.load(batch)
            if bucket is not None:
                self._graphs[buffers.query_len, bucket].replay()
                self.replayed = True
                return self._hidden[buffers.own_rows].clone()  # the next replay overwrites it
        return super()._forward(batch, num_layers)


def decode_buckets(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 16; the largest is ``max_num_seqs`` itself."""
    sizes = itertools.chain((1, 2, 4, 8), itertools.count(16, 16))
    below = list(itertools.takewhile(lambda size: size < max_num_seqs, sizes))
    return [*below, max_num_seqs]


class DecodeBuffers:
    """A decode step's tensors at fixed addresses, for the largest bucket; a bucket uses their first rows.

    A padded sequence is one of length 0. Padded rows of another stand before its own, so that these are its last ones:
    what they attend to is dropped, and their keys go to slot -1, which stores nothing. ``own_rows``: of the bucket's,
    those of the step that was loaded last, in its order.
    """

    def __init__(
        self, buckets: list[int], max_blocks: int, block_size: int, device: torch.device, query_len: int = 1
    ) -> None:
        """buckets: ascending. max_blocks: the longest block table that a sequence can have. query_len: its rows."""
        self.buckets, self.block_size, self.query_len, self.device = buckets, block_size, query_len, device
        self.own_rows: slice | Tensor = slice(0)
        sequences, rows = buckets[-1], buckets[-1] * query_len

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input_ids, self.positions = zeros(rows), zeros(rows)
        self.slot_mapping = zeros(rows) - 1
        self.query_start = torch.arange(0, rows + 1, query_len, dtype=torch.int32, device=device)
        self.seq_lens = zeros(sequences, dtype=torch.int32)
        self.block_table = zeros(sequences, max_blocks, dtype=torch.int32)
        self.logits_indices = torch.arange(rows, device=device)

    def view(self, bucket: int) -> StepBatch:
        """The step that a graph of this bucket runs. Of its sequences the host knows a length, 1, of as many as every
        step has that is padded to it, and 0 of the others."""
        rows = bucket * self.query_len
        fewest = 1 + max((size for size in self.buckets if size < bucket), default=0)
        return StepBatch(
            input_ids=self.input_ids[:rows],
            positions=self.positions[:rows],
            slot_mapping=self.slot_mapping[:rows],
            query_start=self.query_start[: bucket + 1],
            seq_lens=self.seq_lens[:bucket],
            block_table=self.block_table[:bucket],
            logits_indices=self.logits_indices[:rows],
            query_lens=[self.query_len] * bucket,
            kv_lens=[1] * fewest + [0] * (bucket - fewest),
            block_size=self.block_size,
        )

    def load(self, batch: StepBatch) -> int | None:
        """Copy a step in and pad it; its bucket, or None if no graph can run this step, or none should."""
        count, width = batch.block_table.shape
        if not 0 < batch.max_query_len <= self.query_len:
            return None
        if count > self.buckets[-1] or width > self.block_table.shape[1]:
            return None
        bucket = next(size for size in self.buckets if size >= count)
        rows = bucket * self.query_len
        if rows > MAX_PADDING * batch.num_rows:
            return None
        own: slice | Tensor = slice(0, batch.num_rows)
        padded = slice(batch.num_rows, rows)
        if min(batch.query_lens) < self.query_len:
            ends = range(self.query_len, (count + 1) * self.query_len, self.query_len)
            lasts = zip(ends, batch.query_lens, strict=True)
            own = upload([row for end, length in lasts for row in range(end - length, end)], self.device)
            padded = slice(0, rows)
        for held, blank, given in (
            (self.input_ids, 0, batch.input_ids),
            (self.positions, 0, batch.positions),
            (self.slot_mapping, -1, batch.slot_mapping),
        ):
            held[padded] = blank
            held[own] = given
        self.seq_lens[:count] = batch.seq_lens
        self.seq_lens[count:bucket] = 0
        self.block_table[:count, :width] = batch.block_table
        self.own_rows = own
        return bucket
