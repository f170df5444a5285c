from __future__ import annotations

import pytest
import torch
from execution_model import SHAPE, TinyModel, TinyStorage, step

from impls.attention.reference import ReferenceAttention
from impls.execution.cuda_graph import CudaGraphExecutor, DecodeBuffers, decode_buckets
from impls.execution.eager import EagerExecutor
from impls.seams import Arm, StepLimits

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("most", "buckets"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (16, [1, 2, 4, 8, 16]), (40, [1, 2, 4, 8, 16, 32, 40])],
)
def test_buckets(most, buckets):
    assert decode_buckets(most) == buckets


def test_a_padded_step_gives_the_outputs_of_the_step():
    """What a graph would run, run eagerly: same hidden states, nothing stored for the padding."""
    prompts, decode = step([(20, 20), (33, 33), (4, 4)], CPU), step([(1, 21), (1, 34), (1, 5)], CPU)
    model = TinyModel(CPU)
    runs = [
        EagerExecutor(model=model, attention=ReferenceAttention(SHAPE, CPU), storage=TinyStorage(CPU), device=CPU)
        for _ in range(2)
    ]
    for run in runs:
        run.execute(prompts)
    _, expected = runs[0].execute(decode)

    buffers = DecodeBuffers([1, 2, 4, 8], 6, 16, CPU)
    assert buffers.load(step([(1, 60)] * 4, CPU)) == 4, "a step before leaves its lengths, slots and tables behind"
    bucket = buffers.load(decode)
    assert bucket == 4
    padded = buffers.view(bucket)
    padded.kv_lens = padded.seq_lens.tolist()
    assert padded.kv_lens == [21, 34, 5, 0]
    _, hidden = runs[1].execute(padded)
    torch.testing.assert_close(hidden[:3], expected)
    assert hidden.isfinite().all()
    cached = [torch.nan_to_num(run.storage.rows[:, :, :-1], nan=7.0) for run in runs]
    torch.testing.assert_close(cached[0], cached[1])


@pytest.mark.parametrize(
    ("lens", "bucket"),
    [
        ([(1, 5)] * 5, 8),
        ([(1, 5)] * 8, 8),
        ([(1, 5)] * 9, None),  # more sequences than the largest bucket
        ([(1, 5), (2, 9)], None),  # not a decode step
        ([(1, 100)], None),  # a block table wider than any that was captured
        ([], None),
    ],
)
def test_only_decode_steps_that_fit_are_replayed(lens, bucket):
    assert DecodeBuffers([1, 2, 4, 8], 6, 16, CPU).load(step(lens, CPU, blocks_each=7)) == bucket


def test_addresses_and_strides_never_change():
    """vllm#41834: a graph keeps the row stride of its block table; a wider table must not change it."""
    buffers = DecodeBuffers([1, 2, 4], 6, 16, CPU)
    before = {name: (x.data_ptr(), x.stride()) for name, x in vars(buffers.view(2)).items() if torch.is_tensor(x)}
    for kv_len in (5, 90):
        buffers.load(step([(1, kv_len), (1, kv_len)], CPU, blocks_each=6))
        view = buffers.view(2)
        assert before == {name: (x.data_ptr(), x.stride()) for name, x in vars(view).items() if torch.is_tensor(x)}
        assert view.block_table[1, : -(-kv_len // 16)].tolist() == list(range(6, 6 + -(-kv_len // 16)))


def test_validate_names_what_is_missing():
    def reasons(device: str, attention: str) -> list[str]:
        return CudaGraphExecutor.validate(Arm({"attention": {"name": attention}}, SHAPE, 128, device, 1))

    assert reasons("cpu", "triton") == ["needs CUDA"]
    assert "attention=triton" in reasons("cuda", "sdpa")[0]
    assert reasons("cuda", "triton") == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_replay_matches_eager_while_lengths_and_tables_grow():
    from impls.attention.triton_paged import TritonAttention

    device = torch.device("cuda")
    model = TinyModel(device)
    graph, eager = (
        kind(model=model, attention=TritonAttention(SHAPE, device), storage=TinyStorage(device), device=device)
        for kind in (CudaGraphExecutor, EagerExecutor)
    )
    graph.warm_up(StepLimits(5, 64, 64, num_draft_tokens=3))
    for lens in ([(15, 15), (40, 40), (3, 3)], *([(1, 15 + i), (1, 40 + i), (1, 3 + i)] for i in range(1, 20))):
        batch = step(lens, device)
        expected, got = eager.execute(batch), graph.execute(batch)
        torch.testing.assert_close(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])
