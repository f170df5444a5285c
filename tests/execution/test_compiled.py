from __future__ import annotations

import pytest
import torch
from execution_model import SHAPE, TinyModel, TinyStorage, step

from impls.attention.reference import ReferenceAttention
from impls.execution import compiled
from impls.execution.compiled import CompiledExecutor, missing_cpp_toolchain
from impls.execution.eager import EagerExecutor
from impls.seams import Arm

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(bool(missing_cpp_toolchain()), reason="; ".join(missing_cpp_toolchain()))


@needs_compiler
def test_compiled_matches_eager_and_compiles_nothing_after_the_warm_up():
    model = TinyModel(CPU)
    fused, eager = (
        kind(model=model, attention=ReferenceAttention(SHAPE, CPU), storage=TinyStorage(CPU), device=CPU)
        for kind in (CompiledExecutor, EagerExecutor)
    )
    fused.warm_up(4)
    assert fused.storage.k(0).isnan().all(), "a warm-up must store nothing"
    steps = [[(20, 20)], [(1, 21)], [(1, 22), (5, 5)], [(1, 23), (1, 6)], [(30, 53), (1, 7), (3, 3)]]
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for lens in steps:
            batch = step(lens, CPU)  # prepared outside of inference mode, the warm-up's inside
            expected, got = eager.execute(batch), fused.execute(batch)
            torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-4)
        with torch.inference_mode():
            assert fused.execute(step(steps[-1], CPU))[0].isfinite().all()
    finally:
        torch.compiler.set_stance("default")
    for ours, theirs in ((fused.storage.k, eager.storage.k), (fused.storage.v, eager.storage.v)):
        torch.testing.assert_close(ours(1), theirs(1), atol=1e-5, rtol=1e-4, equal_nan=True)


def test_validate_says_what_inductor_lacks(monkeypatch):
    arm = Arm({}, SHAPE, 128, "cpu", 1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert any("no-such-compiler" in reason for reason in CompiledExecutor.validate(arm))
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda name: "/nowhere")
    assert any("Python.h" in reason for reason in CompiledExecutor.validate(arm))
