"""The Triton kernel against the numbers that its packed weights stand for. Run as a script by test_precision_triton.py,
which sets the interpreter before Triton is imported (`case_scripts`). On a machine with CUDA it runs compiled."""

from __future__ import annotations

import os
from collections.abc import Callable

import case_scripts
import torch

from impls.native.grouped import BITS, GROUPS, pack_fields, pack_scales
from impls.precision import gguf, grouped_gemm, triton_grouped
from impls.precision.awq import Awq
from impls.precision.grouped import GroupedWeight, round_symmetrically, round_to_nearest
from impls.precision.w4a8 import W4A8
from impls.precision.w8a8 import quantize_int8
from impls.precision.weight_only import Int2, Int3, Int4, Int8WeightOnly, WeightOnly

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# [N, K] of qkv, o, gate and up, down. The interpreter takes 10 ms for a tile: a sixteenth of the channels, all inputs.
SMOLLM2 = ((60, 576), (36, 576), (192, 576), (36, 1536))
LLAMA3_8B = ((96, 256), (64, 256), (448, 256), (64, 896))  # a sixty-fourth, and a sixteenth


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(seed))


def weights(n: int, k: int, group: int, bits: int, zero_point: bool = False) -> GroupedWeight:
    """Every level, both ends included; scales and offsets that FP16 holds."""
    g = generator(n, k, bits)
    values = torch.randint(0, 1 << bits, (n, k), generator=g).to(torch.uint8)
    values[:, 0], values[:, -1] = 0, (1 << bits) - 1
    scale, offset = (torch.randn(n, k // group, generator=g).half().float() for _ in range(2))
    return GroupedWeight(values, scale, offset, bits, zero_point)


def multiplied(
    x: torch.Tensor, w: GroupedWeight, bias: torch.Tensor | None = None, x_scale: torch.Tensor | None = None
) -> torch.Tensor:
    words = pack_fields(w.values, w.bits, w.group_size).to(DEVICE)
    scales = pack_scales(w.scale, w.offset).to(DEVICE)
    given = [None if each is None else each.to(DEVICE) for each in (bias, x_scale)]
    dtype = x.dtype if x.is_floating_point() else torch.float32
    y = triton_grouped.linear_grouped(
        x.to(DEVICE), words, scales, len(w.values), w.bits, w.group_size, w.zero_point, *given, dtype
    )
    return y.cpu()


def check(rows: int, w: GroupedWeight, with_bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
    """Each output within FP32's error of sums as long as these; in BF16 also that of the result."""
    n, k = w.values.shape
    g = generator(rows, n)
    x = torch.randn(rows, k, generator=g).to(dtype)
    bias = torch.randn(n, generator=g) if with_bias else None
    expected = x.double() @ w.dequantize().double().T + (0.0 if bias is None else bias.double())
    largest = (w.scale.abs() * (1 << w.bits) + w.offset.abs()).double().repeat_interleave(w.group_size, 1)
    if w.zero_point:
        largest = (w.scale.abs() * ((1 << w.bits) + w.offset.abs())).double().repeat_interleave(w.group_size, 1)
    allowed = 3e-6 * (x.double().abs() @ largest.T) + 1e-5
    if dtype == torch.bfloat16:
        allowed += expected.abs() * 2**-7  # a last place: the interpreter cuts the rest off
    error = (multiplied(x, w, bias).double() - expected).abs()
    assert (error <= allowed).all(), (rows, w.values.shape, w.bits, w.group_size, float((error - allowed).max()))


def layers_of_smollm2():
    for (n, k), bits in zip(SMOLLM2, (4, 8, 4, 3), strict=True):
        check(33 if n < 60 else 1, weights(n, k, 64, bits))


def layers_of_llama3_8b():
    for n, k in LLAMA3_8B:
        check(3, weights(n, k, 128, 4))
    check(70, weights(*LLAMA3_8B[0], 128, 4))
    check(1, weights(*LLAMA3_8B[3], 64, 8))


def every_width_and_group_at_every_kind_of_step():
    """A Latin square: each width meets each group, and each of both every number of rows, with and without the rest."""
    for i, bits in enumerate(BITS):
        for j, group in enumerate((*GROUPS, 384)):
            rows = (1, 16, 17, 65)[(i + j) % 4]
            w = weights(37, 384, group, bits, zero_point=(i // 2 + j) % 2 == 1)
            check(rows, w, with_bias=(i + j // 2) % 2 == 1)


def rows_of_any_length_with_one_scale():
    for bits in BITS:
        for k in (1, 5, 33, 96, 160, 300, 577):
            check(3, weights(20, k, k, bits), with_bias=k < 100)


def eight_bits_with_a_scale_for_each_channel():
    found = round_symmetrically(torch.randn(50, 576, generator=generator(0)), 576)
    for rows in (1, 9, 66):
        check(rows, found, with_bias=True)


def activations_in_bf16():
    for rows in (1, 65):
        check(rows, weights(40, 128, 32, 4), with_bias=True, dtype=torch.bfloat16)
        check(rows, weights(40, 128, 64, 8, zero_point=True), dtype=torch.bfloat16)


def what_lies_in_the_padding_is_never_read():
    """Of 17 channels in panels of 16, and of words beyond the last k."""
    w = weights(17, 40, 40, 3)
    x = torch.randn(2, 40, generator=generator(0))
    words, scales = pack_fields(w.values, 3, 40), pack_scales(w.scale, w.offset)
    outputs = []
    for fill in (0, -1):  # of scales: NaN
        words[1, :, 1:], scales[1, :, 1:] = fill, fill
        y = triton_grouped.linear_grouped(
            x.to(DEVICE), words.to(DEVICE), scales.to(DEVICE), 17, 3, 40, False, None, None, torch.float32
        )
        outputs.append(y)
    assert torch.equal(*outputs) and bool(outputs[1].isfinite().all())


def a_group_that_is_no_number_spoils_its_channel_alone():
    dense = torch.randn(20, 128, generator=generator(1))
    dense[7, 70] = torch.nan
    y = multiplied(torch.ones(2, 128), round_to_nearest(dense, 4, 64))
    assert y[:, 7].isnan().all() and y[:, [*range(7), *range(8, 20)]].isfinite().all()


def half_floats_scale_as_torch_widens_them():
    """Of every exponent, both signs, denormals and the largest among them."""
    bits = torch.cat((torch.arange(0, 1 << 16, 61), torch.tensor([1, 1023, 0x7BFF, 0x8001, 0xFBFF])))
    halves = bits.to(torch.int16).view(torch.float16).float()
    halves = halves[halves.isfinite()].view(-1, 1)
    one = torch.ones(len(halves), 32, dtype=torch.uint8)
    w = GroupedWeight(one, halves, torch.zeros_like(halves), 4)
    y = multiplied(torch.full((1, 32), 1 / 32), w)
    assert torch.equal(y[0], halves[:, 0])


def splits_of_k_add_up_to_the_whole():
    """Also where the last of them has no block left."""
    programs = triton_grouped.PROGRAMS
    w = weights(40, 64 * 9, 64, 4)
    try:
        for wanted in (1, 2, 4, 256):
            triton_grouped.PROGRAMS = wanted
            check(5, w, with_bias=True)
    finally:
        triton_grouped.PROGRAMS = programs
    assert triton_grouped.tile(1, 40, 64 * 9, 64)[2] == 4


def a_row_of_a_small_step_is_the_same_whoever_shares_it():
    w = weights(48, 512, 64, 4)
    x = torch.randn(16, 512, generator=generator(2))
    together = multiplied(x, w)
    for rows in (1, 3, 15):
        assert torch.equal(multiplied(x[:rows], w), together[:rows])


def integers_times_integers_are_exact_within_a_group():
    for (n, k, group), bits in (((33, 384, 32), 4), ((17, 256, 128), 4), ((20, 577, 577), 4), ((20, 192, 64), 2)):
        w = weights(n, k, group, bits)
        w.values[-1] = (1 << bits) - 1
        for rows in (1, 17, 65):
            x = torch.randn(rows, k, generator=generator(rows))
            x[0] = 3.0  # every integer 127
            values, x_scale = quantize_int8(x)
            bias = torch.randn(n, generator=generator(n))
            by_group = values.long().view(rows, -1, group)
            sums = torch.einsum("rgk,ngk->rng", by_group, w.values.long().view(n, -1, group)).double()
            parts = sums * w.scale.double() + by_group.sum(-1)[:, None].double() * w.offset.double()
            expected = parts.sum(-1) * x_scale.double() + bias.double()
            each = w.scale.abs().double()[..., None] * w.values.view(n, -1, group) + w.offset.abs()[..., None]
            size = by_group.abs().view(rows, -1).double() @ each.view(n, -1).T * x_scale
            found = multiplied(values, w, bias, x_scale.view(-1)).double()
            assert ((found - expected).abs() <= 1e-6 * size + 1e-6).all()


def methods() -> list[WeightOnly]:
    found: list[WeightOnly] = []
    for method in (Int8WeightOnly, Int4, Int3, Int2, Awq):
        found += [method(DEVICE, group_size=group, kernel="triton_grouped") for group in (None, 32)]
    return found


def methods_multiply_the_weights_that_they_give_back():
    for method in methods():
        assert method.kernel == "triton_grouped"
        for rows, k, n in ((0, 64, 48), (3, 128, 17)):
            g = generator(rows, k)
            dense, bias = torch.randn(n, k, generator=g), torch.randn(n, generator=g)
            x = torch.randn(rows, k, generator=g).to(DEVICE, method.activation_dtype)
            packed = method.pack_calibrated(dense, torch.randn(64, k, generator=g), bias)
            y = method.apply(x, packed)
            assert y.dtype == method.activation_dtype and y.shape == (rows, n)
            kept = method.dequantize(packed)
            expected = x.double() @ kept.double().T + bias.to(DEVICE).double()
            tolerance = 1e-5 if y.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=20 * tolerance)
            ids = torch.tensor([n - 1, 0, 3], device=DEVICE)
            if method.name != "awq":  # whose own scale rows do not carry
                assert torch.equal(method.rows(packed, ids), kept[ids].to(method.activation_dtype))


def stored_blocks_of_a_file():
    method = gguf.Gguf(DEVICE)
    assert method.kernel == "triton_grouped"
    dense = torch.randn(40, 128, generator=generator(3))
    for stored in (round_to_nearest(dense, 4, 32).dequantize(), round_symmetrically(dense, 32).dequantize()):
        packed = method.pack(stored)
        x = torch.randn(3, 128, generator=generator(4)).to(DEVICE, method.activation_dtype)
        assert torch.equal(method.dequantize(packed).cpu(), stored)
        tolerance = 1e-5 if x.dtype == torch.float32 else 2e-2
        expected = x.double() @ stored.to(DEVICE).double().T
        torch.testing.assert_close(method.apply(x, packed).double(), expected, rtol=tolerance, atol=20 * tolerance)


def w4a8_rounds_its_activations():
    method = W4A8(DEVICE, 64)
    assert method.kernel == "triton_w4a8" and method.emulated is None
    g = generator(5)
    dense, bias = torch.randn(33, 192, generator=g), torch.randn(33, generator=g)
    x = torch.randn(9, 192, generator=g).to(DEVICE, method.activation_dtype)
    packed = method.pack(dense, bias)
    values, scale = quantize_int8(x)
    expected = (values.double() * scale.double()) @ method.dequantize(packed).double().T + bias.to(DEVICE).double()
    tolerance = 1e-5 if method.activation_dtype == torch.float32 else 2e-2
    found = method.apply(x, packed)
    assert found.dtype == method.activation_dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=20 * tolerance)
    assert method.apply(x[:0], packed).shape == (0, 33)


def a_compiled_model_keeps_the_call_in_its_graph():
    w = weights(40, 128, 64, 4)
    words, scales = pack_fields(w.values, 4, 64).to(DEVICE), pack_scales(w.scale, w.offset).to(DEVICE)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return triton_grouped.linear_grouped(x * 2, words, scales, 40, 4, 64, False, None, None, x.dtype) + 1

    x = torch.randn(3, 128, generator=generator(6)).to(DEVICE)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


CASES: list[Callable[[], None]] = [
    layers_of_smollm2,
    layers_of_llama3_8b,
    every_width_and_group_at_every_kind_of_step,
    rows_of_any_length_with_one_scale,
    eight_bits_with_a_scale_for_each_channel,
    activations_in_bf16,
    what_lies_in_the_padding_is_never_read,
    a_group_that_is_no_number_spoils_its_channel_alone,
    half_floats_scale_as_torch_widens_them,
    splits_of_k_add_up_to_the_whole,
    a_row_of_a_small_step_is_the_same_whoever_shares_it,
    integers_times_integers_are_exact_within_a_group,
    methods_multiply_the_weights_that_they_give_back,
    stored_blocks_of_a_file,
    w4a8_rounds_its_activations,
    a_compiled_model_keeps_the_call_in_its_graph,
]


if __name__ == "__main__":
    if INTERPRETED:  # which is how a CPU runs what is CUDA's
        grouped_gemm.DEVICES |= {"triton_grouped": ("cpu",), "native_grouped": ()}
        gguf.own_kernel = lambda device: "triton_grouped"
    case_scripts.run(CASES)
