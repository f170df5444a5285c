"""From who runs in a step to the tensors that describe it: one flat row for each token, nothing padded."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from impls.seams import StepBatch


@dataclass
class BatchRow:
    """One sequence's share of a step: ``token_ids`` at positions ``start``..., logits of the ``num_logits`` rows that
    end at row ``logits_end`` (exclusive, counted within this sequence's rows)."""

    seq_id: str
    token_ids: Seq[int]
    start: int
    block_table: Seq[int]
    num_logits: int
    logits_end: int


def build_batch(rows: Seq[BatchRow], block_size: int, device: torch.device) -> StepBatch:
    """Positions, slots and lengths of all rows. One host-to-device copy a tensor; int64 wherever a slot is computed."""
    query_lens = [len(row.token_ids) for row in rows]
    kv_lens = [row.start + length for row, length in zip(rows, query_lens, strict=True)]
    query_start = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start[1:])
    total = int(query_start[-1])
    input_ids = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    slots = np.empty(total, dtype=np.int64)
    widest = max((len(row.block_table) for row in rows), default=1)
    tables = np.zeros((len(rows), widest), dtype=np.int32)
    logits: list[int] = []
    for index, row in enumerate(rows):
        first, last = int(query_start[index]), int(query_start[index + 1])
        table = tables[index, : len(row.block_table)]
        table[:] = row.block_table
        input_ids[first:last] = row.token_ids
        span = positions[first:last]
        span[:] = np.arange(row.start, row.start + last - first)
        slots[first:last] = table[span // block_size].astype(np.int64) * block_size + span % block_size
        logits.extend(range(first + row.logits_end - row.num_logits, first + row.logits_end))

    def put(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        # From pageable memory a copy would wait for what is queued before it.
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    return StepBatch(
        input_ids=put(input_ids),
        positions=put(positions),
        slot_mapping=put(slots),
        query_start=put(query_start),
        seq_lens=put(np.asarray(kv_lens, dtype=np.int32)),
        block_table=put(tables),
        logits_indices=put(np.asarray(logits, dtype=np.int64)),
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_size=block_size,
        seq_ids=[row.seq_id for row in rows],
    )
