"""attention=native against the reference, over every layout, and what may not be read or accepted."""

from __future__ import annotations

import math

import pytest
import torch
from attention_steps import DECODE, MIXED, Step, model_shape, tolerance

from impls import native
from impls.attention.native import NativeAttention
from impls.seams import Arm

needs_native = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_unavailable()}")
LONG = [(1, 1500)]  # long enough that few sequences are cut into parts on two threads
CHUNK = [(100, 700), (1, 600)]


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check(step: Step, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(step.run(step.backend(NativeAttention)), step.reference(), **tolerance(dtype))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["plain", "interleaved", "heads_first"])
@pytest.mark.parametrize("block_size", [16, 12, 2048])
def test_matches_the_reference(block_size: int, layout: str, dtype: torch.dtype) -> None:
    for lens in (MIXED, DECODE, LONG):
        check(Step(lens, block_size=block_size, layout=layout, dtype=dtype), dtype)


@needs_native
def test_long_chunks_over_long_caches() -> None:
    check(Step(CHUNK, block_size=16))
    check(Step([(260, 260)], block_size=512))


@needs_native
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(4, 4, 64), (8, 1, 128), (9, 3, 64), (71, 1, 16), (1, 1, 80), (2, 1, 20), (4, 2, 256), (3, 1, 7)],
)
def test_other_head_shapes(heads: int, kv_heads: int, dim: int) -> None:
    check(Step(MIXED, block_size=16, shape=model_shape(heads, kv_heads, dim)))


@needs_native
def test_queries_may_be_wider_than_the_cache_and_strided() -> None:
    step = Step(MIXED, block_size=16, cache_dtype=torch.bfloat16)
    fused = torch.cat([step.q, torch.full_like(step.q, math.nan)], dim=1)
    step.q = fused[:, : step.shape.num_heads]
    assert not step.q.is_contiguous()
    check(step)


@needs_native
@pytest.mark.parametrize("lens", [MIXED, DECODE, LONG, CHUNK], ids=str)
@pytest.mark.parametrize("block_size", [16, 2048])
def test_what_lies_in_unwritten_slots_changes_no_bit(lens: list[tuple[int, int]], block_size: int) -> None:
    outputs = []
    for poison in (0.0, math.nan, math.inf):
        step = Step(lens, block_size=block_size, poison=poison)
        outputs.append(step.run(step.backend(NativeAttention)))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:]) and bool(outputs[0].isfinite().all())


@needs_native
def test_large_scores_neither_overflow_nor_vanish() -> None:
    step = Step([(1, 200), (9, 90)], block_size=16)
    step.q *= 200  # scores near 2000 carry an error of 1e-4 in FP32, whoever sums them
    torch.testing.assert_close(step.run(step.backend(NativeAttention)), step.reference(), atol=1e-3, rtol=1e-3)


@needs_native
def test_rows_past_the_last_sequence_are_zeros() -> None:
    step = Step(DECODE, block_size=16)
    expected = step.run(step.backend(NativeAttention))
    step.q = torch.cat([step.q, torch.full_like(step.q[:2], math.nan)])
    out = step.run(step.backend(NativeAttention))
    assert torch.equal(out[: len(expected)], expected) and not out[len(expected) :].any()


@needs_native
def test_tables_that_point_outside_are_an_error_not_a_crash() -> None:
    for name, value in (("block_table", 1 << 20), ("block_table", -1), ("seq_lens", 1 << 20), ("query_start", 99)):
        step = Step([(2, 20), (1, 5)], block_size=16)
        getattr(step.batch, name).view(-1)[-1 if name != "block_table" else 0] = value
        with pytest.raises(IndexError, match="point outside"):
            step.run(step.backend(NativeAttention))


@needs_native
def test_wrong_tensors_are_refused_by_name() -> None:
    step = Step([(2, 20)], block_size=16)
    b = step.batch
    tables = (b.query_start, b.seq_lens, b.block_table)
    paged = native.PagedAttention(*tables, 1.0)
    with pytest.raises(ValueError, match="q must be FP32 or BF16"):
        paged(step.q.double(), step.k, step.v)
    with pytest.raises(ValueError, match="dense in D"):
        paged(step.q, step.k[..., ::2], step.v[..., ::2])
    with pytest.raises(ValueError, match="must be alike"):
        paged(step.q, step.k, step.v.bfloat16())
    with pytest.raises(ValueError, match="does not fit a cache of 2 heads"):
        paged(step.q[:, :5], step.k, step.v)
    with pytest.raises(ValueError, match="block_table must be contiguous int32"):
        native.PagedAttention(*tables[:2], b.block_table.long(), 1.0)


def test_validate_says_why_not() -> None:
    def arm(device: str, head_dim: int = 64) -> Arm:
        return Arm({}, model_shape(2, 1, head_dim), 128, device, 1 << 20)

    assert NativeAttention.validate(arm("cuda")) == ["device=cuda: the native kernel runs on the CPU only"]
    assert NativeAttention.validate(arm("cpu")) == ([] if native.available() else [native.why_unavailable()])
    assert "head_dim=1024: at most 512" in NativeAttention.validate(arm("cpu", 1024))
