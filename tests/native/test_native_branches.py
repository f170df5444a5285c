"""Every branch of the C kernels on this one machine: the code for any CPU at all, and that for AVX512, VNNI and
AVX-VNNI, whose instructions emulated.h spells out. Each gives what the machine's own gives, and passes its tests."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import test_native_grouped
import test_native_linear
import torch

from impls import native
from impls.native import attention, build, elementwise, grouped, kv_write, linear

HEADER = Path(__file__).with_name("emulated.h")
AVX2 = "-march=x86-64-v3"
MODULES = (linear, grouped, attention, elementwise, kv_write)
CACHES = (
    linear._linear_bf16, linear._rows_bf16, linear._int8, grouped._function, attention._paged_attention,
    elementwise._function, kv_write._write_quantized,
)  # fmt: skip


def has_avx2() -> bool:
    """What x86-64-v3 adds to the baseline, of what the kernels use."""
    try:
        return {"avx2", "fma", "f16c", "bmi2"} <= set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False


def products_of_int8() -> None:
    test_native_linear.test_int8_sums_are_exact_at_every_tile_height(131, 40)
    test_native_linear.test_int8_sums_do_not_saturate()
    test_native_linear.test_linear_int8_is_its_three_stages(True)


def products_of_w4a8() -> None:
    for n, k, group in ((17, 96, 32), (31, 384, 128), (20, 577, 577), (16, 5, 5)):
        test_native_grouped.test_linear_w4a8_is_exact_within_a_group(n, k, group)


def products_of_floats() -> None:
    test_native_linear.test_linear_bf16_at_every_tile_height(67, 40, True)
    for bits, (n, k, group) in itertools.product(grouped.BITS, ((17, 96, 32), (33, 300, 300))):
        test_native_grouped.test_linear_grouped_at_every_tile_height(bits, n, k, group)


@dataclass(frozen=True)
class Branch:
    """flags: in place of -march=native. sources: of the kernels that are built. runs: their tests, again."""

    flags: tuple[str, ...]
    sources: str
    runs: tuple[Callable[[], None], ...]


EVERYTHING = (products_of_int8, products_of_w4a8, products_of_floats)
BRANCHES = {
    "portable": Branch((), "*.c", EVERYTHING),
    "avx512_vnni": Branch((AVX2, "-include", str(HEADER), "-DEMULATE_VNNI"), "*.c", EVERYTHING),
    "avx512": Branch((AVX2, "-include", str(HEADER), "-DEMULATE_AVX512"), "linear_[iw]*.c", EVERYTHING[:2]),
    "avx_vnni": Branch((AVX2, "-include", str(HEADER), "-DEMULATE_AVXVNNI"), "linear_[iw]*.c", (products_of_w4a8,)),
}


def outputs() -> list[torch.Tensor]:
    """Of every kernel that is not a product of rows with weights."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    tables = (
        torch.tensor([0, 3, 4], dtype=torch.int32),
        torch.tensor([9, 40], dtype=torch.int32),
        torch.tensor([[1, 0, 0, 0, 0], [5, 3, 2, 6, 4]], dtype=torch.int32),
    )
    paged = native.PagedAttention(*tables, 0.2)
    x, wide, q = draw(7, 33), draw(5, 74), draw(4, 2, 52)
    found = [
        native.rms_norm(x, x[0], 1e-5),
        native.add_rms_norm(x.clone(), x, x[1], 1e-5),
        native.silu_and_mul(wide),
        native.rotate(q, q[:, :1].contiguous(), q[:, 1:].contiguous()),
        native.rows_bf16(native.pack_panels(draw(20, 33).bfloat16()), torch.tensor([19, 0, 7]), 20, 33),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        cache = draw(7, 8, 1, 52).to(dtype)
        found.append(paged(q, cache, cache.flip(0)))
    for dtype in (torch.int8, torch.float8_e4m3fn):
        k, v = (torch.zeros(56, 1, 52, dtype=torch.uint8).view(dtype) for _ in range(2))
        k_scale, v_scale = (torch.zeros(56, 1, dtype=torch.bfloat16) for _ in range(2))
        slots = torch.arange(56)
        slots[3] = -1
        native.QuantizedWrite(k, v, k_scale, v_scale)(draw(56, 1, 52), draw(56, 1, 52), slots)
        found += [each.view(torch.uint8).int() for each in (k, v)] + [k_scale, v_scale]
        caches = (k.view(7, 8, 1, 52), v.view(7, 8, 1, 52))
        scales = (k_scale.view(7, 8, 1), v_scale.view(7, 8, 1))
        found.append(paged(q, *caches, *scales))
    return found


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_computes_what_this_machines_own_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.available():
        pytest.skip(f"no native kernels: {native.why_unavailable()}")
    chosen = BRANCHES[name]
    if chosen.flags and not has_avx2():
        pytest.skip("emulated with AVX2, which this CPU lacks")
    expected = outputs()
    flags = [{"-O3": "-O0"}.get(flag, flag) for flag in build.FLAGS if flag != "-march=native"]
    sources = map(str, sorted(build.SOURCE.glob(chosen.sources)))
    build._run([build._compiler(), *flags, *chosen.flags, *sources, "-o", str(tmp_path / "kernels.so"), "-lm"])
    library = ctypes.CDLL(str(tmp_path / "kernels.so"))
    for module in MODULES:
        monkeypatch.setattr(module, "load", lambda: library)
    try:
        for function in CACHES:
            function.cache_clear()
        for each in chosen.runs:
            each()
        if chosen.sources == "*.c":
            for found, own in zip(outputs(), expected, strict=True):
                if found.is_floating_point():
                    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
                else:
                    assert torch.equal(found, own)
            assert all(function.cache_info().currsize for function in CACHES), "another library was reached"
        assert not chosen.flags or ctypes.c_int64.in_dll(library, "emulated").value > 0, "another branch was compiled"
    finally:
        for function in CACHES:
            function.cache_clear()


def test_every_instruction_that_is_used_is_emulated() -> None:
    sources = "".join(file.read_text() for file in build.SOURCE.iterdir())
    used = set(re.findall(r"\b(?:_mm512_|_mm256_dp)\w+", sources))
    assert used and all(f"#define {name} " in HEADER.read_text() for name in used)
