from __future__ import annotations

import pytest
import torch
from execution_model import SHAPE, TinyModel, TinyStorage, step

from impls.attention.reference import ReferenceAttention
from impls.attention.sdpa import SDPAAttention
from impls.execution.compiled import CompiledExecutor
from impls.execution.eager import EagerExecutor
from impls.execution.largest_step import largest_step
from impls.seams import StepLimits

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("seqs", "tokens", "length", "lens"),
    [
        (4, 100, 40, [40, 40, 20]),
        (2, 100, 40, [40, 40]),  # more rows than so many sequences can have
        (4, 30, 40, [30]),
        (4, 80, 40, [40, 40]),
        (4, 200, 40, [40, 40, 32]),  # more than the cache holds
        (4, 200, 400, [112]),
    ],
)
def test_its_rows_are_those_of_the_limits(seqs, tokens, length, lens):
    batch = largest_step(StepLimits(seqs, tokens, length), 7, 16, CPU)
    assert batch.query_lens == batch.kv_lens == batch.seq_lens.tolist() == lens
    assert batch.num_rows == sum(lens) == len(batch.positions)
    assert batch.query_start.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]
    assert batch.logits_indices.tolist() == [start - 1 for start in batch.query_start.tolist()[1:]]
    assert batch.positions.tolist() == [position for each in lens for position in range(each)]
    assert batch.block_table.shape == (len(lens), -(-lens[0] // 16))
    assert (batch.input_ids.dtype, batch.slot_mapping.dtype, batch.query_start.dtype) == (
        torch.int64,
        torch.int64,
        torch.int32,
    )


@pytest.mark.parametrize("attention", [ReferenceAttention, SDPAAttention])
def test_running_it_stores_nothing_and_gives_logits(attention):
    storage = TinyStorage(CPU)
    storage.rows.zero_()
    run = EagerExecutor(model=TinyModel(CPU), attention=attention(SHAPE, CPU), storage=storage, device=CPU)
    logits, hidden = run.execute(largest_step(StepLimits(3, 100, 40), storage.num_blocks, storage.block_size, CPU))
    assert logits.shape == (3, SHAPE.vocab_size) and hidden.shape == (100, SHAPE.hidden_size)
    assert logits.isfinite().all()
    assert not storage.rows[:, :, :-1].any()
    run.execute(step([(20, 20)], CPU))
    assert storage.rows[:, :, :-1].any(), "or the line before would prove nothing"


@pytest.mark.parametrize("kind", [EagerExecutor, CompiledExecutor])
def test_the_warm_up_runs_it_where_it_outlasts_it(kind, monkeypatch):
    options = {"backend": "aot_eager"} if kind is CompiledExecutor else {}
    run = kind(
        model=TinyModel(CPU), attention=ReferenceAttention(SHAPE, CPU), storage=TinyStorage(CPU), device=CPU, **options
    )
    ran: list[list[int]] = []
    monkeypatch.setattr(run, "execute", lambda batch: ran.append(batch.query_lens))
    monkeypatch.setattr(run, "_launch", lambda *given: None, raising=False)
    limits = StepLimits(4, 100, 40)
    run.warm_up(limits)
    assert ran == []

    class CudaInName:  # whose tensors lie on the CPU all the same
        type = "cuda"

    monkeypatch.setattr(run, "device", CudaInName())
    monkeypatch.setattr("impls.execution.eager.largest_step", lambda *given: largest_step(*given[:-1], CPU))
    monkeypatch.setattr("impls.execution.compiled.torch.zeros", lambda *size, **options: torch.empty(0))
    run.warm_up(limits)
    assert ran == [[40, 40, 20]]
