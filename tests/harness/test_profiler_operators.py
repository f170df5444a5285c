"""Time by operator group from traces written by hand, a GPU's among them."""

from __future__ import annotations

from typing import Any

import pytest

from harness.telemetry.operators import operator_table

Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, **more: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 7, **more}


def span(name: str, ts: float, dur: float) -> Event:
    return event("user_annotation", name, ts, dur)


def op(name: str, ts: float, dur: float) -> Event:
    return event("cpu_op", name, ts, dur)


def launch(correlation: int, ts: float, cat: str = "cuda_runtime") -> Event:
    return event(cat, "cudaLaunchKernel", ts, 1, args={"correlation": correlation})


def kernel(correlation: int, name: str, dur: float, cat: str = "kernel") -> Event:
    """On the device's own row and much later than its launch, as kernels are."""
    return event(cat, name, 5000 + correlation, dur, args={"correlation": correlation}) | {"pid": 0, "tid": 20}


def table(events: list[Event], *kinds: str | None) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """(kind, phase, group) -> (calls, cpu us, device us)."""
    found = {}
    for row in operator_table({"traceEvents": events}, kinds):
        times = [None if row[name] is None else pytest.approx(1e6 * row[name]) for name in ("cpu_s", "device_s")]
        found[row["kind"], row["phase"], row["group"]] = (row["calls"], *times)
    return found


CPU_STEP = [
    span("step", 0, 100),
    span("schedule", 1, 4),
    span("forward", 10, 60),
    op("aten::embedding", 11, 2),
    span("elementwise: rms_norm", 13, 3),
    span("layer 0", 20, 40),
    span("self_attn", 20, 20),
    span("linear", 21, 5),
    op("aten::mul", 22, 1),  # belongs to the linear layer around it
    span("kv_write", 27, 2),
    span("attention", 30, 6),
    op("aten::linear", 31, 1),  # no linear layer of the model's
    span("mlp", 41, 18),
    span("linear", 42, 15),
    span("head", 62, 7),
    span("linear", 63, 5),  # the head's own method
    span("sample", 72, 8),
    op("aten::argmax", 73, 2),
    span("propose", 82, 10),
    span("linear", 83, 4),
]


def test_a_step_is_split_by_phase_and_group() -> None:
    assert table(CPU_STEP, "decode") == {
        ("decode", "", "host"): (1, 100 - 4 - 60 - 8 - 10, None),
        ("decode", "schedule", "host"): (1, 4, None),
        ("decode", "forward", "linear"): (2, 20, None),
        ("decode", "forward", "head"): (1, 7, None),
        ("decode", "forward", "attention"): (1, 6, None),
        ("decode", "forward", "kv_write"): (1, 2, None),
        ("decode", "forward", "elementwise"): (1, 3, None),
        ("decode", "forward", "embedding"): (1, 2, None),
        ("decode", "forward", "host"): (1, 60 - 20 - 7 - 6 - 2 - 3 - 2, None),
        ("decode", "sample", "sampling"): (1, 8, None),
        ("decode", "propose", "linear"): (1, 4, None),
        ("decode", "propose", "drafting"): (1, 6, None),
    }


def test_the_order_of_the_events_and_other_threads_do_not_matter() -> None:
    noise = [
        *(op("aten::mm", 500, 9), span("schedule", 300, 2)),  # after the step, in no step
        event("cpu_op", "aten::mm", 12, 30) | {"tid": 8},
        event("Trace", "PyTorch Profiler (0)", 0, 900),
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 3, "pid": 1, "tid": 7, "id": 1},
    ]
    assert table([*noise, *reversed(CPU_STEP)], "decode") == table(CPU_STEP, "decode")


def test_steps_keep_their_kinds_in_order_of_time_and_one_without_is_left_out() -> None:
    later = [each | {"ts": each["ts"] + 200} for each in CPU_STEP]
    last = [span("step", 400, 50), span("schedule", 401, 9)]
    found = table([*last, *later, *CPU_STEP], "prefill", None, "decode")
    assert found["prefill", "forward", "linear"] == (2, 20, None)
    assert {key: value for key, value in found.items() if key[0] == "decode"} == {
        ("decode", "", "host"): (1, 41, None),
        ("decode", "schedule", "host"): (1, 9, None),
    }


def test_a_trace_without_the_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 steps, not 2"):
        table(CPU_STEP, "decode", "decode")


def test_kernels_belong_where_they_were_launched() -> None:
    events = [
        *(span("step", 0, 200), span("forward", 10, 150)),
        *(span("linear", 20, 10), op("aten::mm", 21, 8), launch(1, 22)),
        *(span("attention", 40, 10), launch(2, 42, "cuda_driver")),  # Triton launches by the driver's interface
        *(span("kv_write", 60, 10), op("aten::index_put_", 61, 8), launch(3, 62), launch(4, 65)),
        *(span("prepare", 170, 20), launch(5, 171)),
        launch(6, 900),  # in no step
        event("gpu_user_annotation", "step", 5000, 400) | {"pid": 0, "tid": 20},
        *(kernel(1, "nvjet_tst_128x64", 70), kernel(2, "paged_attention_kernel", 30)),
        *(kernel(3, "index_put_kernel", 5), kernel(4, "Memset", 2, "gpu_memset")),
        *(kernel(5, "Memcpy HtoD", 3, "gpu_memcpy"), kernel(6, "gemm", 1000), kernel(7, "launched before", 1000)),
    ]
    assert table(events, "decode") == {
        ("decode", "", "host"): (1, 30, 0),
        ("decode", "prepare", "host"): (1, 20, 3),
        ("decode", "forward", "linear"): (1, 10, 70),
        ("decode", "forward", "attention"): (1, 10, 30),
        ("decode", "forward", "kv_write"): (1, 10, 7),
        ("decode", "forward", "host"): (1, 120, 0),
    }


def test_kernels_of_a_graph_are_known_by_their_names() -> None:
    """One launch for all of them, in no range of a group."""
    names = {
        **{"_ZN7cutlass6KernelI": "linear", "nvjet_hsh_64x8": "linear", "paged_attention_kernel": "attention"},
        **{"merge_splits_kernel": "attention", "index_put_kernel_impl<bf16>": "kv_write"},
        **{"vectorized_elementwise_kernel": "elementwise", "indexSelectSmallIndex": "embedding", "mystery": "host"},
    }
    events = [span("step", 0, 50), span("forward", 1, 40), launch(9, 5), *(kernel(9, name, 10) for name in names)]
    device = {key[2]: value[2] for key, value in table(events, "decode").items() if key[1] == "forward"}
    groups = list(names.values())
    assert device == {group: 10 * groups.count(group) for group in set(groups)}


def test_operators_of_a_compiled_model_are_known_by_their_names() -> None:
    events = [
        *(span("step", 0, 100), span("forward", 0, 100), op("Torch-Compiled Region: 0/0", 10, 80)),
        *(op("impls::linear", 15, 20), op("impls::attend", 40, 20), span("kv_write", 41, 5), span("attention", 50, 8)),
        op("aten::embedding", 12, 1),
    ]
    assert {key[2]: value[1] for key, value in table(events, "decode").items() if key[1]} == {
        **{"linear": 20, "attention": 8, "kv_write": 5, "embedding": 1},
        **{"elementwise": 80 - 20 - 20 - 1, "host": 20 + (20 - 13)},
    }
