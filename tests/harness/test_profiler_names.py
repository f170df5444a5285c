"""Operators and kernels of the project's own: none is booked as the host's for want of a name that the table knows."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from test_profiler_operators import kernel, launch, op, span, table

import impls
from harness.telemetry.operators import KERNELS, OPERATORS

OWN_OPERATORS = {
    **{"impls::linear": "linear", "impls::attend": "host", "impls_int8::padded_int_mm": "linear"},
    **{"impls_triton::linear_grouped": "linear", "impls_native::rows_bf16": "embedding"},
}
OTHERS_OPERATORS = {
    **dict.fromkeys(("aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu"), "linear"),
    **dict.fromkeys(("aten::_weight_int8pack_mm", "aten::_scaled_mm"), "linear"),
}
OWN_KERNELS = {
    **dict.fromkeys(("grouped_linear_kernel", "add_splits_kernel"), "linear"),
    **dict.fromkeys(("quantize_rows_kernel", "rescale_rows_kernel"), "linear"),
    **dict.fromkeys(("paged_attention_kernel", "merge_splits_kernel"), "attention"),
}


@pytest.fixture(scope="module")
def modules() -> list[object]:
    """All of `impls`, so that what registers an operator has. Without Triton, those that need none."""
    found = []
    for each in pkgutil.walk_packages(impls.__path__, "impls."):
        try:
            found.append(importlib.import_module(each.name))
        except ModuleNotFoundError as error:
            if error.name not in ("triton", "transformers"):
                raise
    return found


def test_every_operator_that_the_project_registers_has_a_group(modules: list[object]) -> None:
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    own = {name for name in names if name.partition(":")[0].startswith("impls")}
    assert {"impls::linear", "impls_int8::padded_int_mm", "impls_native::rows_bf16"} <= own
    assert not [name for name in own if not any(pattern.search(name) for pattern, _ in OPERATORS)]


def test_every_triton_kernel_of_the_project_has_a_group(modules: list[object]) -> None:
    triton = pytest.importorskip("triton", reason="needs the package triton")
    kernels = triton.runtime.KernelInterface
    names = {name for module in modules for name, value in vars(module).items() if isinstance(value, kernels)}
    launched = {name for name in names if not name.startswith("_")}  # the others are parts of these
    assert launched >= set(OWN_KERNELS)
    assert not [name for name in launched if not any(pattern.search(name) for pattern, _ in KERNELS)]


def test_they_are_booked_in_their_groups() -> None:
    for name, group in {**OWN_OPERATORS, **OTHERS_OPERATORS}.items():
        events = [span("step", 0, 50), span("forward", 1, 40), op(name, 5, 20)]
        times = {key[2]: value[1] for key, value in table(events, "decode").items() if key[1] == "forward"}
        assert times == ({"host": 40} if group == "host" else {"host": 20, group: 20}), name
    for name, group in OWN_KERNELS.items():
        events = [span("step", 0, 50), span("forward", 1, 40), launch(9, 5), kernel(9, name, 10)]
        assert table(events, "decode")["decode", "forward", group][2] == 10, name
