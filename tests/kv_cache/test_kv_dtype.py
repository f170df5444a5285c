"""Keys and values in 8 bits: how they are rounded, where they land, what moves with them and what they take."""

from __future__ import annotations

import pytest
import torch

from impls import native
from impls.kv_cache.contiguous import ContiguousCache
from impls.kv_cache.host_swap import HostSwap
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.quantized import LARGEST, quantize
from impls.kv_cache.storage import KVStorage
from impls.seams import ModelShape, ScaledCache

CPU = torch.device("cpu")
DTYPES = sorted(LARGEST, key=str)
HEADS, DIM = 3, 20  # not a multiple of any vector's width
NAN, UNTOUCHED = 0x7F, -7.0
needs_native = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_unavailable()}")
WRITERS = ["torch", pytest.param("native", marks=needs_native)]


def vectors(count: int, seed: int = 0, dim: int = DIM, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of very different sizes, some with outliers, one of them zero."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HEADS, dim, generator=draw) * 10.0 ** torch.randint(-6, 4, (count, HEADS, 1), generator=draw)
    x[::3, :, 1] *= 20
    x[0, 0] = 0
    return x.to(dtype)


def storage(dtype: torch.dtype, writer: str = "torch", num_blocks: int = 4, **options: object) -> KVStorage:
    held = KVStorage(2, num_blocks, 2, HEADS, DIM, dtype, CPU, **options)  # type: ignore[arg-type]
    if writer == "torch":
        held._writers = []
    else:
        assert held._writers, "this machine has the kernels, and the storage does not use them"
    for layer in range(2):
        for kept in (held.k(layer), held.v(layer)):
            kept.values.view(torch.uint8).fill_(NAN)
            kept.scales.fill_(UNTOUCHED)
    return held


def same(kept: ScaledCache, index: object, x: torch.Tensor) -> bool:
    """Does the cache hold these vectors there, bit for bit?"""
    values, scales = quantize(x, kept.values.dtype)
    found = kept.values[index].view(torch.uint8)
    return torch.equal(found, values.view(torch.uint8)) and torch.equal(kept.scales[index], scales)


class TestRounding:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_number_is_the_nearest_that_its_scale_allows(self, dtype: torch.dtype) -> None:
        """Against all numbers of the type, listed by torch."""
        every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        every = every[every.abs() <= LARGEST[dtype]].unique()
        x = vectors(60)
        values, scales = quantize(x, dtype)
        assert (values.dtype, scales.dtype) == (dtype, torch.bfloat16)
        kept = values.double() * scales.double()[..., None]
        nearest = (x.double()[..., None] - every * scales.double()[..., None, None]).abs().amin(-1)
        slack = 1e-6 * x.double().abs()  # a quotient in FP32 may fall on the other side of a half
        assert bool(((kept - x.double()).abs() <= nearest + slack).all())

    @pytest.mark.parametrize(("dtype", "worst"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 2.0**-4)], ids=str)
    def test_the_error_is_that_of_the_type(self, dtype: torch.dtype, worst: float) -> None:
        """INT8: half a step of the vector's largest number; E4M3: half a last place of each number, or of the least."""
        x = vectors(200, 1).double()
        values, scales = quantize(x, dtype)
        error = (values.double() * scales.double()[..., None] - x).abs()
        peak = x.abs().amax(-1, keepdim=True)
        of = peak if dtype == torch.int8 else torch.maximum(x.abs(), peak * 2.0**-6 / 448)
        assert bool((error <= 1.01 * worst * of).all())
        assert float((error / of.clamp_min(1e-300)).max()) > 0.8 * worst, "it is finer than 8 bits can be"

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_a_vector_knows_nothing_of_the_others(self, dtype: torch.dtype) -> None:
        x = vectors(8, 2)
        together = quantize(x, dtype)
        for token in range(8):
            alone = quantize(x[token : token + 1], dtype)
            assert torch.equal(alone[0].view(torch.uint8), together[0][token : token + 1].view(torch.uint8))
            assert torch.equal(alone[1], together[1][token : token + 1])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_zeros_stay_zeros_and_the_largest_does_not_overflow(self, dtype: torch.dtype) -> None:
        x = torch.stack([torch.zeros(DIM), torch.full((DIM,), 1e30), torch.full((DIM,), -1e-30)])
        values, scales = quantize(x, dtype)
        kept = values.float() * scales.float()[:, None]
        assert bool(kept.isfinite().all()) and not kept[0].any()
        torch.testing.assert_close(kept[1], x[1], rtol=0.01, atol=0)

    def test_half_way_goes_to_even(self) -> None:
        x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5])
        assert quantize(x, torch.int8)[0].tolist() == [127, 0, 2, 2, 0, -2, -126]
        x = torch.tensor([448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10])  # E4M3: steps of 2 from 16 on, 2^-9 near 0
        assert quantize(x, torch.float8_e4m3fn)[0].float().tolist() == [448, 16, 20, -16, 0, 2.0**-8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestWriting:
    @pytest.mark.parametrize("writer", WRITERS)
    def test_rows_and_scales_land_in_their_slots_and_nowhere_else(self, dtype: torch.dtype, writer: str) -> None:
        held, k, v = storage(dtype, writer), vectors(4, 3), vectors(4, 4)
        held.write(1, k, v, torch.tensor([5, -1, 0, 6]))
        for kept, x in ((held.k(1), k), (held.v(1), v)):
            assert kept.values.shape == (4, 2, HEADS, DIM) and kept.scales.shape == (4, 2, HEADS)
            for place, row in (((2, 1), 0), ((0, 0), 2), ((3, 0), 3)):
                assert same(kept, place, x[row])
            untouched = (kept.scales == UNTOUCHED).all(-1)
            assert int(untouched.sum()) == 8 - 3
            assert bool((kept.values.view(torch.uint8)[untouched] == NAN).all())
        for kept in (held.k(0), held.v(0)):
            assert bool((kept.scales == UNTOUCHED).all())

    @pytest.mark.parametrize("writer", WRITERS)
    def test_a_slot_outside_the_cache_is_an_error(self, dtype: torch.dtype, writer: str) -> None:
        for slot in (9, -20):
            with pytest.raises(IndexError):
                storage(dtype, writer).write(0, vectors(1), vectors(1), torch.tensor([slot]))
        with pytest.raises(TypeError, match="int64"):
            storage(dtype, writer).write(0, vectors(1), vectors(1), torch.tensor([1], dtype=torch.int32))

    @needs_native
    @pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dim", [7, 16, 64, 80])
    def test_the_kernel_writes_what_torch_writes(self, dtype: torch.dtype, source: torch.dtype, dim: int) -> None:
        """Bit for bit, for rows that are slices of wider ones, on one thread and on several."""
        slots = torch.arange(1, 601)
        fused = torch.cat([vectors(600, 5, dim, source), vectors(600, 6, dim, source)], 1)
        k, v = fused[:, :HEADS], fused[:, HEADS:]
        assert not k.is_contiguous()
        found = {}
        for writer in ("torch", "native"):
            held = KVStorage(1, 76, 8, HEADS, dim, dtype, CPU)
            held.make_resident()
            held._writers = held._writers if writer == "native" else []
            held.write(0, k, v, slots)
            found[writer] = [x.view(torch.uint8) for part in (held.k(0), held.v(0)) for x in part]
        assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_rounds_every_number_as_torch_does(dtype: torch.dtype) -> None:
    """A dense sweep of what can be left after the division, halves and subnormals among it, beside the largest."""
    top = LARGEST[dtype]
    step = torch.linspace(-top, top, 8191)
    small = torch.linspace(-2.0**-5, 2.0**-5, 4097) if dtype == torch.float8_e4m3fn else torch.arange(-254, 255) / 2
    x = torch.cat([step, small])
    x = torch.cat([x[: len(x) // 15 * 15].view(-1, 15), torch.full((len(x) // 15, 1), top)], 1)[:, None]
    rows = [torch.zeros(len(x), 1, 16, dtype=torch.uint8).view(dtype) for _ in range(2)]
    scales = [torch.zeros(len(x), 1, dtype=torch.bfloat16) for _ in range(2)]
    native.QuantizedWrite(*rows, *scales)(x, -x, torch.arange(len(x)))
    for kept, scale, given in zip(rows, scales, (x, -x), strict=True):
        values, expected = quantize(given, dtype)
        assert torch.equal(kept.view(torch.uint8), values.view(torch.uint8)) and torch.equal(scale, expected)


@needs_native
def test_wrong_tensors_are_refused_by_name() -> None:
    held = storage(torch.int8, "native")
    with pytest.raises(ValueError, match="k must be floats"):
        held.write(0, vectors(2)[..., :4], vectors(2), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="one a token"):
        held.write(0, vectors(2), vectors(2), torch.tensor([0]))
    good, scales = torch.zeros(4, 1, 8, dtype=torch.int8), torch.zeros(4, 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="rows must be contiguous INT8 or E4M3"):
        native.QuantizedWrite(good, good.float(), scales, scales)
    with pytest.raises(ValueError, match="scales must be contiguous BF16"):
        native.QuantizedWrite(good, good, scales, scales.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestMoving:
    def test_blocks_move_whole_with_their_scales(self, dtype: torch.dtype) -> None:
        source, target = storage(dtype), storage(dtype, num_blocks=6)
        k, v = vectors(4, 7), vectors(4, 8)
        for layer in range(2):
            source.write(layer, k * (layer + 1), v, torch.tensor([2, 3, 6, 7]))  # blocks 1 and 3
        data = source.export([3, 1])
        assert data.shape == (2, 2, 2, 2, HEADS, DIM + 2) and data.dtype == dtype
        assert data.nbytes == 2 * shape(HEADS, DIM, 2).kv_bytes_per_token(1) * 2  # two blocks of two positions
        source.make_resident()  # a copy: what was exported does not change
        target.import_([0, 5], data)
        for layer in range(2):
            for kept, x in ((target.k(layer), k * (layer + 1)), (target.v(layer), v)):
                assert same(kept, 5, x[:2]) and same(kept, 0, x[2:])
                assert bool((kept.scales[1:5] == UNTOUCHED).all())

    def test_the_other_type_of_8_bits_is_refused(self, dtype: torch.dtype) -> None:
        other = next(each for each in DTYPES if each != dtype)
        with pytest.raises(ValueError, match="does not fit 1 blocks"):
            storage(dtype).import_([0], storage(other).export([0]))

    def test_a_swap_brings_back_every_bit(self, dtype: torch.dtype) -> None:
        held, x = storage(dtype), vectors(2, 9)
        for layer in range(2):
            held.write(layer, x, -x, torch.tensor([2, 3]))
        swap = HostSwap([held], CPU)
        size = swap.swap_out("a", [1])
        assert size == 2 * shape(HEADS, DIM, 2).kv_bytes_per_token(1)
        held.make_resident()
        assert swap.swap_in("a", [3]) == size
        assert all(same(held.k(layer), 3, x) and same(held.v(layer), 3, -x) for layer in range(2))

    def test_another_process_sees_the_same_in_shared_memory(self, dtype: torch.dtype) -> None:
        size = KVStorage.bytes_needed(2, 4, 2, HEADS, DIM, dtype)
        memory = torch.zeros(size, dtype=torch.uint8)
        ours, theirs = (storage(dtype, "torch", memory=memory) for _ in range(2))
        assert ours.num_bytes() == size == storage(dtype).num_bytes()
        x = vectors(8, 10)
        for layer in range(2):
            ours.write(layer, x * (1 + layer), -x, torch.arange(8))
        for layer in range(2):
            assert same(theirs.k(layer), ..., (x * (1 + layer)).view(4, 2, HEADS, DIM))
            assert same(theirs.v(layer), ..., -x.view(4, 2, HEADS, DIM))


def shape(num_kv_heads: int, head_dim: int, num_layers: int) -> ModelShape:
    return ModelShape(64, 64, 64, num_layers, num_kv_heads, num_kv_heads, head_dim, 4096)


@pytest.mark.parametrize(("head_dim", "factor"), [(32, 64 / 34), (64, 128 / 66), (128, 256 / 130), (256, 512 / 258)])
def test_a_budget_holds_more_positions_by_the_exact_factor(head_dim: int, factor: float) -> None:
    """1.88 to 1.98 times BF16's: half the bytes, and two for the scale of every head's vector."""
    model = shape(3, head_dim, 30)
    wide, narrow = model.kv_bytes_per_token(2), model.kv_bytes_per_token(1)
    assert wide / narrow == pytest.approx(factor) and 1.88 < factor < 1.99
    budget = 1000 * 16 * wide
    paged = [PagedCache(budget_bytes=budget, bytes_per_token=each, max_model_len=512) for each in (wide, narrow)]
    assert [kv.num_blocks for kv in paged] == [1000, int(1000 * 16 * factor) // 16]
    rows = [ContiguousCache(budget_bytes=budget, bytes_per_token=each, max_model_len=160) for each in (wide, narrow)]
    assert [kv.num_blocks for kv in rows] == [100, int(100 * factor)]
    for kv, dtype in zip(paged, (torch.bfloat16, torch.int8), strict=True):  # and the tensors keep to it
        taken = KVStorage.bytes_needed(30, kv.num_blocks, kv.block_size, 3, head_dim, dtype)
        assert budget * 0.99 < taken <= budget + model.kv_bytes_per_token(dtype.itemsize)
