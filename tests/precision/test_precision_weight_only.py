"""int8_weight_only, int4, int3, int2, gguf, fp16: what is multiplied is exactly the weights that are documented."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from impls.precision import grouped_gemm
from impls.precision.bf16 import Bf16
from impls.precision.fp16 import Fp16
from impls.precision.gguf import Gguf, stored_blocks
from impls.precision.grouped import round_symmetrically, round_to_nearest
from impls.precision.weight_only import Int2, Int3, Int4, Int8WeightOnly, WeightOnly
from impls.seams import Arm, LinearMethod, ModelShape

CPU = torch.device("cpu")
METHODS = (Int8WeightOnly, Int4, Int3, Int2)
SIZES = [(1, 576, 64), (0, 64, 48), (3, 128, 17), (9, 192, 1), (33, 384, 200)]


def cases() -> list[WeightOnly]:
    found = []
    for method in METHODS:
        for group in (None, 32, 64):
            why = {k: grouped_gemm.why_not(k, CPU, method.bits, group is None) for k in grouped_gemm.KERNELS}
            found += [method(CPU, group_size=group, kernel=kernel) for kernel in why if why[kernel] is None]
    return found


CASES = pytest.mark.parametrize("method", cases(), ids=lambda m: f"{m.name}-{m.group_size}-{m.kernel}")


def tensors(rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows * 1000 + k + n)
    return torch.randn(rows, k, generator=g), torch.randn(n, k, generator=g), torch.randn(n, generator=g)


@CASES
@pytest.mark.parametrize("with_bias", [False, True])
def test_apply_is_the_product_with_the_dequantised_weights(method: WeightOnly, with_bias: bool) -> None:
    for rows, k, n in SIZES:
        x, w, b = tensors(rows, k, n)
        packed = method.pack(w, b if with_bias else None)
        x = x.to(method.activation_dtype)
        y = method.apply(x, packed)
        assert y.dtype == method.activation_dtype and y.shape == (rows, n)
        expected = x.double() @ method.dequantize(packed).double().T + (b.double() if with_bias else 0.0)
        tolerance = 1e-5 if y.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=20 * tolerance)


@CASES
def test_no_weight_is_further_from_its_level_than_half_a_step(method: WeightOnly) -> None:
    _, w, _ = tensors(1, 192, 33)
    error = (method.dequantize(method.pack(w)) - w).view(33, -1, method.group_size or 192)
    groups = w.view(error.shape)
    if method.bits == 8:
        step = groups.abs().amax(-1) / 127
    else:
        step = (groups.amax(-1) - groups.amin(-1)) / ((1 << method.bits) - 1)
    rounding = 2.0**-8 if method.activation_dtype == torch.bfloat16 else 2.0**-10  # of scales and offsets
    allowed = step * 0.5 + rounding * groups.abs().amax(-1)
    assert (error.abs().amax(-1) <= allowed).all()
    assert error.abs().max() > 0.3 * step.min(), "nothing was rounded"


@CASES
def test_rows_are_those_of_the_dequantised_weights(method: WeightOnly) -> None:
    _, w, _ = tensors(1, 128, 37)
    packed = method.pack(w)
    ids = torch.tensor([36, 0, 5, 5])
    rows = method.rows(packed, ids)
    if method.kernel == "torch_int4pack":
        assert rows is None
    else:
        assert rows is not None and rows.dtype == method.activation_dtype
        assert torch.equal(rows, method.dequantize(packed)[ids].to(rows.dtype))


@CASES
def test_zeros_constants_denormals_and_nan_stay_what_they_are(method: WeightOnly) -> None:
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    w[1] = 0.0
    w[2] = 0.5  # no extent: the offset says it all
    w[3] = 1e-42
    w[4, 7] = torch.nan
    packed = method.pack(w)
    dense = method.dequantize(packed)
    assert not dense[1].any() and dense[3].abs().max() < 1e-6
    torch.testing.assert_close(dense[2], w[2], rtol=1e-2 if method.bits == 8 else 1e-6, atol=0)
    assert dense[4].isnan().any() and torch.isfinite(dense[[0, 1, 2, 3, *range(5, 16)]]).all()
    y = method.apply(torch.ones(2, 64, dtype=method.activation_dtype), packed)
    assert y[:, 4].isnan().all() and torch.isfinite(y[:, 5:]).all() and not y[:, 1].any()


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_format(method: type[WeightOnly]) -> None:
    kernel = "native_grouped" if grouped_gemm.why_not("native_grouped", CPU, 4, False) is None else "dequantized"
    packed = method(CPU, group_size=64, kernel=kernel).pack(torch.randn(64, 128))
    assert packed.num_bytes() == 64 * 128 * method.bits // 8 + 64 * 2 * 4  # FP16 scale and offset a group


def test_a_group_has_a_scale_of_its_own() -> None:
    w = torch.ones(1, 128)
    w[0, 64:] = torch.linspace(-100, 100, 64)
    w[0, :64] = torch.linspace(-0.01, 0.01, 64)
    small = Int4(CPU, group_size=64).dequantize(Int4(CPU, group_size=64).pack(w))[0, :64]
    assert (small - w[0, :64]).abs().max() < 0.001 < (small.max() - small.min())
    assert not Int4(CPU, group_size=None).dequantize(Int4(CPU, group_size=None).pack(w))[0, :64].unique().numel() > 2


def arm(hidden: int = 576, device: str = "cpu", model: object = None, **precision: object) -> Arm:
    shape = ModelShape(256, hidden, 1536, 2, 9, 3, 64, 128)
    return Arm({"precision": precision, "model": model or {}}, shape, 128, device, 1 << 20)


def test_a_group_that_does_not_divide_the_inputs_is_refused() -> None:
    assert Int4.validate(arm(group_size=64)) == [] == Int4.validate(arm(group_size=None))
    reasons = Int4.validate(arm(group_size=128))
    assert reasons[0] == "group_size=128 does not divide hidden_size=576; allowed: 32, 64, null"
    assert Int4.validate(arm(group_size=48))[0].startswith("group_size=48 is not one of 32, 64, 128")
    with pytest.raises(ValueError, match="group_size=128 does not divide in_features=576"):
        Int4(CPU, group_size=128).pack(torch.zeros(4, 576))


@pytest.mark.parametrize("avx512", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_torch_s_operators_are_taken_with_both_avx512_and_bf16(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, bf16: bool
) -> None:
    """Without BF16 instructions all else in a step would pay for the BF16 activations that they want."""
    monkeypatch.setattr(grouped_gemm, "has_avx512", lambda: avx512)
    monkeypatch.setattr(grouped_gemm, "has_bf16_instructions", lambda: bf16)
    own = grouped_gemm.own_kernel(CPU)
    assert grouped_gemm.best_kernel(CPU, 4, False) == ("torch_int4pack" if avx512 and bf16 else own)
    assert grouped_gemm.best_kernel(CPU, 8, True) == ("torch_int8pack" if avx512 and bf16 else own)
    assert grouped_gemm.best_kernel(CPU, 8, False) == own


def test_validate_names_a_kernel_that_cannot_run() -> None:
    assert "not a kernel for device cuda" in Int4.validate(arm(device="cuda", kernel="native_grouped"))[0]
    assert "not for 3 bits" in Int3.validate(arm(group_size=64, kernel="torch_int4pack"))[0]
    assert "not for 8 bits with a scale for each group" in Int8WeightOnly.validate(
        arm(group_size=64, kernel="torch_int8pack")
    )[0]
    assert "must be auto or one of" in Int4.validate(arm(kernel="marlin"))[0]


@pytest.mark.parametrize(
    ("method", "head_bits", "name"),
    [
        (Int4, 16, "bf16"),
        (Int4, 8, "int8_weight_only"),
        (Int4, 4, "same"),
        (Int3, 8, "int8_weight_only"),
        (Int2, 4, "int4"),
        (Int8WeightOnly, 8, "same"),
    ],
)
def test_the_head_has_the_bits_that_were_asked_for(method: type[WeightOnly], head_bits: int, name: str) -> None:
    made = method(CPU, group_size=None if method is Int8WeightOnly else 64, head_bits=head_bits)  # type: ignore[arg-type]
    head = made.head_method()
    assert (head is made) if name == "same" else head.name == name
    assert head.head_method().name == head.name, "a head's own head would be packed in other numbers"
    assert isinstance(Int4(CPU).head_method(), Bf16)


# --- gguf -------------------------------------------------------------------------------------------------------------


def stored(kind: str, n: int, k: int) -> torch.Tensor:
    """FP32 weights as a GGUF reader gives them: quantised and dequantised by the gguf package itself."""
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize, quantize

    kinds = {"q4_1": GGMLQuantizationType.Q4_1, "q8_0": GGMLQuantizationType.Q8_0, "q5_0": GGMLQuantizationType.Q5_0}
    draw = np.random.default_rng(n)
    w = (draw.standard_normal((n, k)) * draw.lognormal(size=(n, 1))).astype(np.float32)
    w[0] = 0
    w[-1, :32] = 0.25
    return torch.from_numpy(dequantize(quantize(w, kinds[kind]), kinds[kind]))


@pytest.mark.parametrize(("kind", "bits"), [("q4_1", 4), ("q8_0", 8)])
def test_stored_blocks_are_found_bit_for_bit(kind: str, bits: int) -> None:
    w = stored(kind, 65, 192)
    method = Gguf(CPU)
    packed = method.pack(w)
    assert stored_blocks(w).bits == bits and torch.equal(method.dequantize(packed), w)
    assert packed.num_bytes() == (80 * 192 * bits) // 8 + 80 * 6 * 4  # 65 channels lie in panels of 16
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(method.apply(x, packed), x @ w.T, rtol=1e-5, atol=1e-4)
    ids = torch.tensor([64, 3])
    rows = method.rows(packed, ids)
    assert rows is not None and torch.equal(rows, w[ids])


def test_what_is_not_stored_so_is_refused() -> None:
    for w in (torch.randn(4, 64), torch.randn(4, 33), stored("q5_0", 8, 64)):
        with pytest.raises(ValueError, match="not stored as Q4_1 or Q8_0 blocks"):
            Gguf(CPU).pack(w)


def test_gguf_needs_a_gguf_file_whose_head_it_multiplies_too() -> None:
    assert "model=m is no GGUF file" in Gguf.validate(arm(model={"name": "m", "path": "/x"}))[0]
    tied, own = "model.embed_tokens.weight", "lm_head.weight"
    types = {tied: "Q6_K", "model.layers.0.mlp.down_proj.weight": "Q4_1", "model.norm.weight": "F32"}
    for stored, why in ((types, [tied]), (types | {own: "Q8_0"}, []), (types | {own: "F16"}, [own])):
        reasons = Gguf.validate(replace(arm(), stored_types=stored))
        assert [reason.partition(" ")[0] for reason in reasons] == why
    assert Gguf(CPU).permutation_seed is None


# --- fp16 -------------------------------------------------------------------------------------------------------------


def test_fp16_multiplies_its_rounded_weights() -> None:
    method: LinearMethod = Fp16(CPU)
    x, w, b = tensors(5, 96, 33)
    packed = method.pack(w, b)
    assert packed.num_bytes() == 2 * w.numel() and torch.equal(method.dequantize(packed), w.half().float())
    torch.testing.assert_close(method.apply(x, packed), x @ w.half().float().T + b, rtol=1e-5, atol=1e-5)
    assert not torch.equal(method.dequantize(packed), w.bfloat16().float())
    rows = method.rows(packed, torch.tensor([3]))
    assert rows is not None and torch.equal(rows, w.half().float()[[3]])


# --- the quantiser ----------------------------------------------------------------------------------------------------


def test_levels_are_chosen_for_the_scale_that_is_kept() -> None:
    """Rounded to FP16 first, then the weights: the other way round a third of the steps would be missed."""
    w = torch.linspace(-3, 5, 32)[None] * 1.0001
    found = round_to_nearest(w, 4, 32)
    levels = found.scale * torch.arange(16.0) + found.offset
    nearest = (w[..., None] - levels).abs().amin(-1)
    assert torch.equal((found.dequantize() - w).abs(), nearest)
    assert found.scale.equal(found.scale.half().float()) and found.offset.equal(found.offset.half().float())


def test_eight_bits_are_symmetric_around_a_zero_that_is_kept() -> None:
    w = torch.tensor([[0.0, -2.0, 1.0, 0.003] * 8])
    found = round_symmetrically(w, 32)
    assert found.values[0, :4].tolist() == [128, 1, 192, 128] and found.dequantize()[0, 0] == 0
