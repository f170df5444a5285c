"""Named ranges around an engine's phases, layers and kernels: put there from outside, for a profiled pass only.

Each wraps a method of one object and is taken off again, so that an engine that is not profiled enters none. The C
kernels of `impls.native`, which a profiler cannot see, lie inside such a range. Under `torch.compile` and in a CUDA
graph none can be entered in a layer: their steps have phases, attention, K/V writes and the head (`compiled_layers`
finds the layers of the former afterwards, on a CPU).
"""

# mypy: allow-untyped-calls
# (`record_function` carries no annotations.)

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

import impls.engine
from harness.linear_stages import packed_layers
from harness.telemetry.operators import ATTENTION, ELEMENTWISE, EMBEDDING, HEAD, KV_WRITE, LINEAR
from impls.engine import Engine
from impls.execution.compiled import CompiledExecutor
from impls.execution.eager import EagerExecutor
from impls.models.llama import LlamaModel
from impls.seams import Executor, PackedLinear

BETWEEN_PRODUCTS = ("impls.models.ops", "impls.models.rope")  # whose functions a model calls by their names

P = ParamSpec("P")
T = TypeVar("T")
Open = Callable[[str], AbstractContextManager[object]]


@contextmanager
def ranges(engine: Engine) -> Iterator[Open]:
    """While this is open, the engine's steps enter ranges; gives what opens a further one. NVTX ranges too on CUDA.

    Phases are named as in steps.parquet. Inside of forward and propose: ``layer N``, in it ``self_attn`` and ``mlp``,
    in these the groups of `operators.GROUPS`, some with what it is behind a colon.
    """
    open_range = _with_nvtx if engine.device.type == "cuda" else record_function
    with ExitStack() as stack:

        def wrap(owner: object, method: str, name: str) -> None:
            stack.enter_context(_replaced(owner, method, _inside(open_range, name, getattr(owner, method))))

        wrap(engine.scheduler, "schedule", "schedule")
        wrap(engine, "_swap", "swap")
        wrap(impls.engine, "prepare", "prepare")
        wrap(engine.executor, "execute", "forward")
        wrap(engine.runner, "decode", "sample")
        wrap(engine, "_commit", "commit")
        if engine.proposer is not None:
            wrap(engine.proposer, "observe", "propose")
            wrap(engine.drafting, "propose", "propose")
        executors = [each for each in (engine.executor, engine.draft_executor) if each is not None]
        modules = set()
        for executor in executors:
            wrap(executor.attention, "prepare", ATTENTION)
            wrap(executor.attention, "forward", ATTENTION)
            if isinstance(executor, EagerExecutor):
                wrap(executor.storage, "write", KV_WRITE)
            model = executor.model
            if not isinstance(model, LlamaModel):
                continue
            wrap(model, "logits", HEAD)
            if isinstance(executor, CompiledExecutor):
                continue  # what is traced must stay as it was, or it would be compiled anew
            wrap(model.head_method, "rows", EMBEDDING)
            modules.add(type(model).__module__)
            _tell_layers(stack, executor, model, open_range)
        for module in (sys.modules[name] for name in sorted(modules)):
            for name, function in list(vars(module).items()):
                if getattr(function, "__module__", None) in BETWEEN_PRODUCTS:
                    wrap(module, name, f"{ELEMENTWISE}: {name}")
        yield open_range


def _tell_layers(stack: ExitStack, executor: Executor, model: LlamaModel, open_range: Open) -> None:
    layers = _Layers(executor, model, open_range)
    stack.enter_context(_replaced(model, "forward", layers.forward))
    stack.enter_context(_replaced(model.method, "apply", layers.apply))
    stack.enter_context(_replaced(executor.attention, "forward", layers.attend))


class _Layers:
    """Tells a layer from the next by the linear layers that a pass reaches; the second one after attention opens the
    MLP, the first being the output projection.
    """

    def __init__(self, executor: Executor, model: LlamaModel, open_range: Open) -> None:
        self._forward, self._apply, self._attend = model.forward, model.method.apply, executor.attention.forward
        self._open_range = open_range
        with torch.inference_mode():
            self._per_layer = len(packed_layers(model, model.method.device)) // model.shape.num_layers
        self._layer, self._block = ExitStack(), ExitStack()
        self._running = False
        self._applied = self._attended = 0  # linear layers since the pass began, and as many when attention last ran

    def forward(self, *arguments: object, **options: object) -> Tensor:
        self._running, self._applied = True, 0
        try:
            return self._forward(*arguments, **options)  # type: ignore[arg-type]
        finally:
            self._running = False
            self._block.close()
            self._layer.close()

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if self._running:  # the LM head may be of the same method
            self._advance()
        with self._open_range(LINEAR):
            return self._apply(x, packed)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, layer: int) -> Tensor:
        self._attended = self._applied
        return self._attend(q, k_cache, v_cache, layer)

    def _advance(self) -> None:
        layer, position = divmod(self._applied, self._per_layer)
        if position == 0:
            self._block.close()
            self._layer.close()
            self._layer.enter_context(self._open_range(f"layer {layer}"))
            self._block.enter_context(self._open_range("self_attn"))
        elif self._applied == self._attended + 1:
            self._block.close()
            self._block.enter_context(self._open_range("mlp"))
        self._applied += 1


def _inside(open_range: Open, name: str, function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        with open_range(name):
            return function(*arguments, **options)

    return call


@contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name):
        yield


_ABSENT = object()


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """An attribute of an object (or module) for a while: one of its class's is only hidden."""
    own = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
