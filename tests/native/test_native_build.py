"""Building, caching and loading the C kernels, and living with torch in one OpenMP runtime."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from impls import native
from impls.native import build
from impls.precision.bf16 import Bf16

needs_native = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_unavailable()}")


def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """Tests of the kernels are skipped without them: a build that failed, or took too long, must not look the same."""
    why = native.why_unavailable()
    assert why is None or why.startswith(("no C compiler found", "the kernels are built on POSIX"))


@needs_native
def test_a_compiled_library_is_reused_and_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one short source: the kernels themselves take ten seconds, and are built by whoever loads them first."""
    (tmp_path / "one.c").write_text("__attribute__((visibility(\"default\"))) int one(void) { return 1; }")
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    cache = tmp_path / "cache"
    library = build.compile_library(cache)
    assert ctypes.CDLL(str(library)).one() == 1
    stamp = library.stat().st_mtime_ns
    assert build.compile_library(cache) == library
    assert library.stat().st_mtime_ns == stamp and list(cache.iterdir()) == [library]


def test_another_cpu_compiler_or_flag_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library_path("true", tmp_path)
    assert build.library_path("true", tmp_path) == first
    monkeypatch.setattr(build, "_run", lambda command: "another version")
    second = build.library_path("true", tmp_path)
    monkeypatch.setattr(build, "_cpu_identity", lambda: "another CPU")
    third = build.library_path("true", tmp_path)
    monkeypatch.setattr(build, "FLAGS", ("-O2",))
    assert len({first, second, third, build.library_path("true", tmp_path)}) == 4


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(native.NativeUnavailable, match=r"no C compiler found \(looked for cc, gcc, clang\)"):
        build.compile_library(tmp_path)


@needs_native
def test_a_compile_error_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.c").write_text("int f( {")
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    with pytest.raises(native.NativeUnavailable, match="failed with status"):
        build.compile_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_kernels_everything_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty PATH and cache, where nothing has been loaded yet: the BF16 method still runs, on torch alone."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build._load.cache_clear()
    try:
        method = Bf16(torch.device("cpu"))
        y = method.apply(torch.ones(2, 8, dtype=method.activation_dtype), method.pack(torch.ones(4, 8)))
        assert method.kernel != "native_bf16" and y.unique().tolist() == [8.0]
        assert str(native.why_unavailable()).startswith("no C compiler found")
    finally:
        build._load.cache_clear()


@needs_native
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    native.linear_bf16(torch.ones(1, 64), native.pack_panels(torch.ones(64, 64).bfloat16()), 64)
    mapped = {Path(line.split()[5]).name for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    assert any(name.startswith("kernels-") for name in mapped)
    assert len({name for name in mapped if name.startswith(("libgomp", "libiomp", "libomp"))}) == 1


@needs_native
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc/self/task")
def test_torchs_thread_setting_is_followed() -> None:
    """In a fresh process: one thread starts no other, two start exactly one more."""
    code = (
        "import os, torch; from impls import native; torch.set_num_threads(1); x = torch.ones(4, 512); "
        "w = native.pack_panels(torch.ones(512, 512).bfloat16()); count = lambda: len(os.listdir('/proc/self/task')); "
        "before = count(); native.linear_bf16(x, w, 512); one = count() - before; torch.set_num_threads(2); "
        "native.linear_bf16(x, w, 512); print(one, count() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.split() == ["0", "1"]


@needs_native
def test_a_call_costs_little() -> None:
    """Through ctypes with its checks and its output: under 30 us of this thread's time even on a slow, busy machine."""
    torch.set_num_threads(1)
    x, w = torch.ones(1, 16), native.pack_panels(torch.ones(16, 16).bfloat16())
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        for _ in range(200):
            native.linear_bf16(x, w, 16)
        best = min(best, (time.thread_time() - start) / 200)
    assert best < 30e-6
