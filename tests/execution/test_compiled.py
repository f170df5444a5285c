from __future__ import annotations

import itertools

import pytest
import torch
from execution_model import SHAPE, TinyModel, TinyStorage, step

from impls.attention.reference import ReferenceAttention
from impls.execution import compiled
from impls.execution.compiled import CompiledExecutor, missing_cpp_toolchain
from impls.execution.eager import EagerExecutor
from impls.seams import Arm, StepLimits

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(bool(missing_cpp_toolchain()), reason="; ".join(missing_cpp_toolchain()))


class TickingClock:
    """A second passes from one look to the next."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def now(self) -> float:
        return float(next(self._ticks))

    def sleep_until(self, deadline_s: float) -> None:
        raise AssertionError("an executor does not wait")


def pair(num_layers: int, backend: str) -> tuple[CompiledExecutor, EagerExecutor]:
    model = TinyModel(CPU, num_layers=num_layers)
    parts = [
        {"model": model, "attention": ReferenceAttention(SHAPE, CPU), "storage": TinyStorage(CPU), "device": CPU}
        for _ in range(2)
    ]
    return CompiledExecutor(**parts[0], backend=backend, clock=TickingClock()), EagerExecutor(**parts[1])


def assert_same(fused: CompiledExecutor, eager: EagerExecutor, lens: list[tuple[int, int]]) -> None:
    batch = step(lens, CPU)
    for ours, theirs in zip(fused.execute(batch), eager.execute(batch), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    for layer in range(SHAPE.num_layers):
        for ours, theirs in ((fused.storage.k, eager.storage.k), (fused.storage.v, eager.storage.v)):
            torch.testing.assert_close(ours(layer), theirs(layer), atol=1e-5, rtol=1e-4, equal_nan=True)


@needs_compiler
def test_fused_kernels_match_eager():
    """One layer, rows above 1: each shape class costs a C++ build of several seconds."""
    fused, eager = pair(num_layers=1, backend="inductor")
    assert_same(fused, eager, [(20, 20), (2, 2)])
    assert_same(fused, eager, [(1, 21), (1, 3), (31, 31)])


def test_nothing_is_compiled_after_the_warm_up():
    fused, eager = pair(num_layers=2, backend="aot_eager")
    fused.warm_up(StepLimits(4, 64, 64))
    assert fused.storage.k(0).isnan().all(), "a warm-up must store nothing"
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for lens in [[(20, 20)], [(1, 21)], [(1, 22), (5, 5)], [(1, 23), (1, 6)], [(30, 53), (1, 7), (3, 3)]]:
            assert_same(fused, eager, lens)  # prepared outside of inference mode
            with torch.inference_mode():
                assert_same(fused, eager, lens)
            assert fused.attention_s == 2, "one second in each layer"
        with pytest.raises(RuntimeError, match="recompile"):
            fused.draft(step([(4, 4)], CPU), 1)
    finally:
        torch.compiler.set_stance("default")
    torch.testing.assert_close(fused.draft(step([(4, 4)], CPU), 1), eager.draft(step([(4, 4)], CPU), 1))


def test_graphs_hold_no_address():
    """An address differs in each process, and with it the graph, which Inductor's cache on disk would never know."""
    calls: dict[str, list[tuple]] = {"impls.attend": [], "impls.linear": []}

    def backend(graph, example_inputs):
        for node in graph.graph.nodes:
            calls.get(str(node.target), []).append(node.args)
        return graph.forward

    fused, eager = pair(num_layers=2, backend=backend)
    assert_same(fused, eager, [(1, 1)])
    assert [layer for *_, layer, _ in calls["impls.attend"]] == [0, 1]
    assert [layer for *_, layer, _ in calls["impls.linear"]] == list(range(2 * 4))
    # The number of an executor that is not the process's first may be an input of the graph instead.
    numbers = [arg for args in itertools.chain(*calls.values()) for arg in args if isinstance(arg, int)]
    assert len(numbers) >= 2 + 2 * 8 and max(numbers) < 1000


def test_attention_fails_loudly_inside_the_graph_and_the_executor_survives():
    fused, eager = pair(num_layers=2, backend="aot_eager")
    batch = step([(4, 4)], CPU)
    batch.slot_mapping = batch.slot_mapping + 10**6
    with pytest.raises(IndexError):
        fused.execute(batch)
    assert_same(fused, eager, [(4, 4)])


def test_validate_says_what_inductor_lacks(monkeypatch):
    arm = Arm({}, SHAPE, 128, "cpu", 1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert any("no-such-compiler" in reason for reason in CompiledExecutor.validate(arm))
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda name: "/nowhere")
    assert any("Python.h" in reason for reason in CompiledExecutor.validate(arm))
