"""Building, caching and loading the C kernels, and living with torch in one OpenMP runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from impls import native
from impls.native import build

needs_native = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_unavailable()}")


def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """Tests of the kernels are skipped without them: a build that failed, or took too long, must not look the same."""
    why = native.why_unavailable()
    assert why is None or why.startswith(("no C compiler found", "the kernels are built on POSIX"))


@needs_native
def test_a_compiled_library_is_reused_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    library = build.compile_library(tmp_path)
    stamp = library.stat().st_mtime_ns
    assert build.compile_library(tmp_path) == library
    assert library.stat().st_mtime_ns == stamp and list(tmp_path.iterdir()) == [library]


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


def test_without_kernels_everything_falls_back(tmp_path: Path) -> None:
    """A fresh process with an empty PATH and cache: the BF16 method still runs, on torch alone."""
    code = (
        "import torch; from impls import native; from impls.precision.bf16 import Bf16; "
        "m = Bf16(torch.device('cpu')); x = torch.ones(2, 8, dtype=m.activation_dtype); "
        "y = m.apply(x, m.pack(torch.ones(4, 8))); print(m.kernel, y.unique().tolist(), '|', native.why_unavailable())"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("CC", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    kernel, rest = done.stdout.strip().split(" ", 1)
    assert kernel != "native_bf16" and rest.startswith("[8.0] | no C compiler found")


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


@needs_native
def test_torch_compile_keeps_the_call_in_its_graph() -> None:
    x, b, packed = torch.randn(3, 32), torch.randn(16), native.pack_panels(torch.randn(16, 32).bfloat16())

    def layer(x: torch.Tensor) -> torch.Tensor:
        return native.linear_bf16(x * 2, packed, 16, b) + 1

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
