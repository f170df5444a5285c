"""Attention over 8-bit keys and values equals the reference over the FP32 numbers that they stand for."""

from __future__ import annotations

import math

import pytest
import torch
from attention_steps import DECODE, MIXED, Step, in_8_bits, model_shape, tolerance

from impls import native
from impls.attention.native import NativeAttention
from impls.attention.reference import ReferenceAttention
from impls.attention.sdpa import SDPAAttention
from impls.attention.triton_paged import TritonAttention
from impls.seams import AttentionBackend

needs_native = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_unavailable()}")
BACKENDS = [ReferenceAttention, SDPAAttention, pytest.param(NativeAttention, marks=needs_native)]
DTYPES = [torch.int8, torch.float8_e4m3fn]
LONG = [(1, 1500)]  # long enough that few sequences are cut into parts on two threads


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "interleaved", "heads_first"])
def test_equals_the_reference_on_what_is_dequantised(
    backend: type[AttentionBackend], dtype: torch.dtype, layout: str
) -> None:
    """And what lies in unwritten slots, scales and E4M3's NaN among it, changes no bit."""
    for lens, block_size in ((MIXED, 16), (DECODE, 12), (LONG, 16), ([(100, 700), (1, 600)], 2048)):
        step = Step(lens, block_size=block_size)
        outputs = []
        for poison in (0.0, math.nan, math.inf):
            scaled, wide = in_8_bits(step, dtype, layout, poison)
            outputs.append(scaled.run(scaled.backend(backend)))
        torch.testing.assert_close(outputs[-1], wide.reference(), **tolerance(torch.float32))
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bf16_queries_and_other_head_shapes(backend: type[AttentionBackend], dtype: torch.dtype) -> None:
    for heads, kv_heads, dim in ((4, 4, 64), (8, 1, 128), (71, 1, 16), (2, 1, 20), (3, 1, 7)):
        for queries in (torch.float32, torch.bfloat16):
            step = Step(MIXED, block_size=16, shape=model_shape(heads, kv_heads, dim), dtype=queries)
            scaled, wide = in_8_bits(step, dtype)
            torch.testing.assert_close(scaled.run(scaled.backend(backend)), wide.reference(), **tolerance(queries))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_block_a_sequence_at_equal_lengths(backend: type[AttentionBackend]) -> None:
    """Where SDPA reads its keys by a view, not by a gather."""
    step = Step([(1, 40)] * 3, block_size=64, shuffle=False)
    for dtype in DTYPES:
        scaled, wide = in_8_bits(step, dtype)
        torch.testing.assert_close(scaled.run(scaled.backend(backend)), wide.reference(), **tolerance(torch.float32))


@needs_native
def test_every_e4m3_number_is_what_torch_says() -> None:
    """As values behind a single key each: what comes out is the value itself."""
    bits = torch.tensor([n for n in range(256) if n & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    for dim in (64, 4):  # by vectors, and by what is left of them
        step = Step([(1, 1)] * (256 // dim), block_size=1, shape=model_shape(1, 1, dim))
        scaled, _ = in_8_bits(step, torch.float8_e4m3fn)
        rows = bits.view(-1, 1, dim)
        scaled.v.values.view(torch.uint8)[step.written] = rows
        scaled.v.scales[step.written] = 1.0
        assert torch.equal(scaled.run(scaled.backend(NativeAttention)), rows.view(torch.float8_e4m3fn).float())


def test_sdpa_counts_what_it_gathers_and_widens() -> None:
    step = Step([(1, 20), (1, 30)], block_size=16, shape=model_shape(6, 2, 64, num_layers=7))
    scaled, _ = in_8_bits(step, torch.int8)
    backend = scaled.backend(SDPAAttention)
    scaled.run(backend)
    padded = 2 * 30
    assert backend.gathered_bytes(step.batch) == 7 * 2 * padded * 2 * (64 * 1 + 2 + 64 * 4)


@needs_native
def test_a_cache_and_its_scales_belong_together() -> None:
    step = Step([(2, 20)], block_size=16)
    scaled, _ = in_8_bits(step, torch.int8)
    paged = native.PagedAttention(step.batch.query_start, step.batch.seq_lens, step.batch.block_table, 1.0)
    (k, k_scale), (v, v_scale) = scaled.k, scaled.v
    with pytest.raises(ValueError, match="a cache of 8 bits, and no other, has scales"):
        paged(step.q, k, v)
    with pytest.raises(ValueError, match="a cache of 8 bits, and no other, has scales"):
        paged(step.q, step.k, step.v, k_scale, v_scale)
    with pytest.raises(ValueError, match="v_scale must be BF16"):
        paged(step.q, k, v, k_scale, v_scale.float())
    with pytest.raises(ValueError, match="must be alike"):
        paged(step.q, k, v.view(torch.float8_e4m3fn), k_scale, v_scale)


def test_every_backend_says_how_it_reads_8_bits() -> None:
    backends = (ReferenceAttention, SDPAAttention, NativeAttention, TritonAttention)
    assert [bool(backend.reads_scaled) for backend in backends] == [True] * 4
    assert AttentionBackend.reads_scaled is None, "a backend that says nothing would be taken to read them"
