"""The model's own operators fused by `torch.compile`; attention and the cache stay outside, as one opaque operator."""

# mypy: allow-untyped-calls
# (`torch.library.Library` carries no annotations.)

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
import shutil
import sys
import sysconfig
import weakref
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from impls.execution.eager import EagerExecutor
from impls.seams import (
    Arm,
    AttentionBackend,
    CausalLM,
    Clock,
    LayerAttention,
    LayerStorage,
    LinearMethod,
    PackedLinear,
    StepBatch,
    StepLimits,
)

# Operators take numbers, not objects: these find the object behind one. Weak, so a finished trial can be freed. Numbers
# are counted, so the same arm in a new process has the same graphs, and Inductor's cache on disk knows them.
_executors: weakref.WeakValueDictionary[int, CompiledExecutor] = weakref.WeakValueDictionary()
_linears: weakref.WeakValueDictionary[int, OpaqueLinear] = weakref.WeakValueDictionary()
_executor_numbers, _linear_numbers = itertools.count(), itertools.count()

# A graph break would not do in the place of an operator: Dynamo gives up on a frame that breaks inside a loop, and the
# layers are one. `torch.library.custom_op` does the same as these lines at 3x the cost of a call.
_library = torch.library.Library("impls", "FRAGMENT")
_library.define("attend(Tensor q, Tensor k, Tensor v, int layer, int executor) -> Tensor")
_library.define("linear(Tensor x, int linear, int layer, int out_features) -> Tensor")


def _attend(q: Tensor, k: Tensor, v: Tensor, layer: int, executor: int) -> Tensor:
    return _executors[executor].attend(layer, q, k, v).contiguous()


def _linear(x: Tensor, linear: int, layer: int, out_features: int) -> Tensor:
    opaque = _linears[linear]
    return opaque.method.apply(x, opaque.layers[layer]).contiguous()


_library.impl("attend", _attend, "CompositeExplicitAutograd")
_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "impls::attend", lambda q, k, v, layer, executor: torch.empty(q.shape, dtype=q.dtype, device=q.device), lib=_library
)
torch.library.register_fake(
    "impls::linear", lambda x, linear, layer, out_features: x.new_empty(x.shape[0], out_features), lib=_library
)


class CompiledExecutor(EagerExecutor):
    """Compiles `CausalLM.forward` once for one row and once for any larger number of rows.

    Numbers of rows are symbolic from 2 on (Dynamo specialises 0 and 1), so no step's shape compiles anew; both classes
    are compiled by `warm_up`. A step that stops after ``num_layers`` layers is compiled when it is first asked for.
    On a CPU the linear layers are opaque too: their kernels want weights in layouts that Inductor cannot read.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        attention: AttentionBackend,
        storage: LayerStorage,
        device: torch.device,
        clock: Clock | None = None,
        overlap: str = "off",
        backend: str = "inductor",
    ) -> None:
        """backend: of `torch.compile`. Anything but inductor traces without fusing, which is for debugging."""
        super().__init__(
            model=model, attention=attention, storage=storage, device=device, clock=clock, overlap=overlap
        )
        self.compiler = backend
        self.number = next(_executor_numbers)
        _executors[self.number] = self
        self.attend: LayerAttention = _no_attention
        self._traced = copy.copy(model)
        if device.type == "cpu":
            self._traced.method = cast(LinearMethod, OpaqueLinear(model.method))
            with torch.inference_mode():  # shows every packed layer to OpaqueLinear before it is traced
                one_row = torch.zeros(1, dtype=torch.int64)
                self._whole_forward(one_row, one_row, None)
        self._compiled = torch.compile(self._whole_forward, backend=backend)

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        reasons = super().validate(arm)
        if arm.device != "cuda":
            return reasons + missing_cpp_toolchain()
        if importlib.util.find_spec("triton") is None:
            reasons.append("needs the package triton, which is not installed")
        return reasons

    def warm_up(self, limits: StepLimits) -> None:
        """Compile both classes of rows. Nothing is stored: attention yields zeros meanwhile."""
        with torch.inference_mode():
            for rows in (1, 2):
                ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
                self._launch(ids, ids, None)
        super().warm_up(limits)

    def _forward(self, batch: StepBatch, num_layers: int | None = None) -> Tensor:
        self.attention.prepare(batch)
        self.attend = self._attention_of(batch)
        try:
            return self._launch(batch.input_ids, batch.positions, num_layers)
        finally:
            self.attend = _no_attention

    def _launch(self, input_ids: Tensor, positions: Tensor, num_layers: int | None) -> Tensor:
        # Copies, so that guards see the same kind of tensor whether or not the step was prepared in inference mode.
        input_ids, positions = input_ids.clone(), positions.clone()
        if len(input_ids) > 1:
            torch._dynamo.mark_dynamic(input_ids, 0)
            torch._dynamo.mark_dynamic(positions, 0)
        return self._compiled(input_ids, positions, num_layers)

    def _whole_forward(self, input_ids: Tensor, positions: Tensor, num_layers: int | None) -> Tensor:
        executor = self.number

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cast(Tensor, torch.ops.impls.attend(q, k, v, layer, executor))

        return self._traced.forward(input_ids, positions, attend, num_layers)


class OpaqueLinear:
    """Stands for a linear method while its model is traced: the graph gets one operator instead of its kernels."""

    def __init__(self, method: LinearMethod) -> None:
        self.method, self.activation_dtype = method, method.activation_dtype
        self.number = next(_linear_numbers)
        _linears[self.number] = self
        self.layers: list[PackedLinear] = []
        self._layer_of: dict[int, int] = {}  # by the id of a packed layer, which ``layers`` keeps alive

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if not torch.compiler.is_compiling() and id(packed) not in self._layer_of:
            self._layer_of[id(packed)] = len(self.layers)
            self.layers.append(packed)
        layer = self._layer_of[id(packed)]
        return cast(Tensor, torch.ops.impls.linear(x, self.number, layer, packed.out_features))


def _no_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros_like(q)


def missing_cpp_toolchain() -> list[str]:
    """Why Inductor cannot build CPU kernels here, if it cannot: it calls a C++ compiler and includes Python.h."""
    reasons = []
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        reasons.append(f"needs a C++ compiler: {compiler} is not on the path (the variable CXX names another)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        reasons.append("needs Python's C headers (Python.h; on Debian the package python3-dev)")
    return reasons
