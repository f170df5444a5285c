"""What CUDA graphs replay, run eagerly: there is no GPU in these tests, but the padding of steps needs none."""

from __future__ import annotations

import pytest
import torch
from execution_model import SHAPE, TinyModel, TinyStorage, step

from impls.attention.reference import ReferenceAttention
from impls.execution.cuda_graph import CudaGraphExecutor, DecodeBuffers
from impls.execution.eager import EagerExecutor
from impls.seams import StepLimits

CPU = torch.device("cpu")
PROMPTS = [(20, 20), (33, 33), (4, 4)]


def eager() -> EagerExecutor:
    run = EagerExecutor(
        model=TinyModel(CPU), attention=ReferenceAttention(SHAPE, CPU), storage=TinyStorage(CPU), device=CPU
    )
    run.execute(step(PROMPTS, CPU))
    return run


@pytest.mark.parametrize("lens", [(4, 4, 4), (4, 2, 3), (3, 4, 1)], ids=str)
def test_a_step_that_verifies_drafts_gives_the_outputs_of_the_step(lens):
    verify = step([(length, kv_len + length) for length, (_, kv_len) in zip(lens, PROMPTS, strict=True)], CPU)
    plain, padded = eager(), eager()
    _, expected = plain.execute(verify)

    buffers = DecodeBuffers([1, 2, 4], 6, 16, CPU, query_len=4)
    assert buffers.load(step([(4, 60)] * 4, CPU)) == 4, "a step before leaves its lengths, slots and tables behind"
    assert buffers.load(verify) == 4
    batch = buffers.view(4)
    batch.kv_lens = batch.seq_lens.tolist()
    assert batch.kv_lens == [*verify.kv_lens, 0] and batch.num_rows == 16
    _, hidden = padded.execute(batch)
    torch.testing.assert_close(hidden[buffers.own_rows], expected)
    assert hidden.isfinite().all()
    cached = [torch.nan_to_num(run.storage.rows[:, :, :-1], nan=7.0) for run in (plain, padded)]
    torch.testing.assert_close(cached[0], cached[1])


def test_own_rows_stand_last_in_their_sequence_and_the_others_store_nothing():
    buffers = DecodeBuffers([2], 6, 16, CPU, query_len=3)
    assert buffers.load(step([(3, 9), (1, 8)], CPU)) == 2
    assert torch.arange(6)[buffers.own_rows].tolist() == [0, 1, 2, 5]
    assert (buffers.slot_mapping >= 0).tolist() == [True, True, True, False, False, True]
    assert buffers.load(step([(3, 9), (3, 8)], CPU)) == 2
    assert torch.arange(6)[buffers.own_rows].tolist() == list(range(6))


@pytest.mark.parametrize(
    ("lens", "bucket"),
    [
        ([(4, 9)], 1),
        ([(2, 9)], 1),
        ([(1, 9), (4, 9)], 2),
        ([(1, 9)] * 3 + [(4, 9)], None),  # 16 rows in place of 7
        ([(1, 9)] * 2 + [(4, 9)] * 2, 4),
        ([(5, 9)], None),
        ([(4, 9)] * 9, None),
    ],
)
def test_a_graph_for_drafts_replays_what_it_would_not_pad_to_more_than_twice_its_rows(lens, bucket):
    assert DecodeBuffers([1, 2, 4, 8], 6, 16, CPU, query_len=4).load(step(lens, CPU, blocks_each=2)) == bucket


@pytest.mark.parametrize("most", [1, 3, 16, 40, 256])
def test_no_decode_step_of_one_row_a_sequence_is_left_out(most):
    limits = StepLimits(most, 512, 64)
    (buffers,) = graphs().buffers_for(limits)
    for count in range(1, most + 1):
        assert buffers.load(step([(1, 5)] * count, CPU, blocks_each=1)) in buffers.buckets


def test_of_a_bucket_the_host_knows_as_many_sequences_as_any_step_has_that_is_padded_to_it():
    buffers = DecodeBuffers([1, 2, 4, 8, 12], 6, 16, CPU)
    assert [sum(buffers.view(bucket).kv_lens) for bucket in buffers.buckets] == [1, 2, 3, 5, 9]
    assert [len(buffers.view(bucket).kv_lens) for bucket in buffers.buckets] == [1, 2, 4, 8, 12]


def graphs(num_blocks: int = 24, **options: object) -> CudaGraphExecutor:
    storage = TinyStorage(CPU, num_blocks=num_blocks)
    return CudaGraphExecutor(
        model=TinyModel(CPU), attention=ReferenceAttention(SHAPE, CPU), storage=storage, device=CPU, **options
    )


@pytest.mark.parametrize(
    ("length", "num_blocks", "widest"),
    [
        (64, 24, 4),
        (65, 24, 8),  # a piece of a power of two holds five blocks
        (300, 24, 24),  # 19 blocks: no piece is larger than the cache
    ],
)
def test_block_tables_hold_what_a_cache_reserves_in_powers_of_two(length, num_blocks, widest):
    buffers = graphs(num_blocks).buffers_for(StepLimits(4, 64, length, num_draft_tokens=3))
    assert [each.block_table.shape for each in buffers] == [(4, widest)] * 2
    assert [each.query_len for each in buffers] == [1, 4]


class Replay:
    """Stands for a captured graph: runs eagerly what it would replay."""

    def __init__(self, run: CudaGraphExecutor, buffers: DecodeBuffers, bucket: int) -> None:
        self.run, self.buffers, self.bucket = run, buffers, bucket

    def replay(self) -> None:
        batch = self.buffers.view(self.bucket)
        batch.kv_lens = batch.seq_lens.tolist()  # which a kernel reads from the device
        self.run._hidden[: batch.num_rows] = EagerExecutor._forward(self.run, batch)


def test_steps_are_replayed_where_a_graph_fits_and_launched_elsewhere():
    run, norm = graphs(), eager()
    buffers = run.buffers_for(StepLimits(4, 64, 64, num_draft_tokens=3))
    run._hidden = torch.zeros(16, SHAPE.hidden_size)
    run._graphs = {(each.query_len, b): Replay(run, each, b) for each in buffers for b in each.buckets}  # type: ignore[misc]
    run._buffers = buffers
    run.execute(step(PROMPTS, CPU))
    assert not run.replayed
    for lens, replayed in (
        ([(1, 21), (1, 34), (1, 5)], True),
        ([(4, 25), (4, 38), (4, 9)], True),
        ([(2, 27), (4, 42), (3, 12)], True),
        ([(6, 33), (1, 43)], False),
    ):
        expected, got = norm.execute(step(lens, CPU)), run.execute(step(lens, CPU))
        assert run.replayed == replayed
        torch.testing.assert_close(got, expected)
    logits = run.draft(step([(1, 33)], CPU), 1)
    torch.testing.assert_close(logits, norm.draft(step([(1, 33)], CPU), 1))
