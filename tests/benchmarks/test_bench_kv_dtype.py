"""A decode step's attention, and the writing of its keys and values, by the type that they are kept in; one layer."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from attention_steps import model_shape

from impls import native
from impls.attention.native import NativeAttention
from impls.attention.reference import ReferenceAttention
from impls.build import KV_DTYPES
from impls.kv_cache.storage import KVStorage
from impls.step_batch import BatchRow, build_batch

CPU = torch.device("cpu")
SHAPE = model_shape(9, 3, 64)
BLOCK = 16
NAMES = ("bf16", "int8", "fp8")
CACHED_BYTES = 80e6  # of BF16, more than a processor's own caches hold: a step reads each layer anew

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_unavailable()}")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("context", "batch"), [(512, 1), (2048, 1), (512, 8), (2048, 8)])
def test_decode_attention(benchmark: Any, context: int, batch: int) -> None:
    """A round attends in every layer once with each type, one after the other: the median of a round's ratios, in CPU
    time, says which is faster whatever else the machine does."""
    draw = torch.Generator().manual_seed(0)
    blocks = context // BLOCK
    layers = max(4, int(CACHED_BYTES / (context * batch * SHAPE.kv_bytes_per_token(2))))
    storages = {name: KVStorage(layers, blocks * batch, BLOCK, 3, 64, KV_DTYPES[name], CPU) for name in NAMES}
    x = torch.randn(context * batch, 3, 64, generator=draw)
    for storage in storages.values():
        for layer in range(layers):
            storage.write(layer, x, x, torch.arange(context * batch))
    tables = torch.randperm(blocks * batch, generator=draw).view(batch, blocks).tolist()
    step = build_batch([BatchRow(str(i), [0], context - 1, table, 1, 1) for i, table in enumerate(tables)], BLOCK, CPU)
    q = torch.randn(batch, 9, 64, generator=draw)
    kernel, norm = NativeAttention(SHAPE, CPU), ReferenceAttention(SHAPE, CPU)
    kernel.prepare(step)
    norm.prepare(step)
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    out = {}

    def each_type() -> None:
        for name, storage in storages.items():
            start = time.thread_time()
            for layer in range(layers):
                out[name] = kernel.forward(q, storage.k(layer), storage.v(layer), layer)
            seconds[name].append((time.thread_time() - start) / layers)

    benchmark.pedantic(each_type, rounds=12, warmup_rounds=1)
    for name, storage in storages.items():
        torch.testing.assert_close(out[name], norm.forward(q, storage.k(0), storage.v(0), 0), atol=1e-5, rtol=1e-5)
    bytes_each = {name: storage.num_bytes() for name, storage in storages.items()}
    assert 1.93 < bytes_each["bf16"] / bytes_each["int8"] < 1.95
    benchmark.extra_info.update({f"us {name}": round(min(taken) * 1e6, 1) for name, taken in seconds.items()})
    for name in NAMES[1:]:
        ratios = [wide / narrow for wide, narrow in zip(seconds["bf16"], seconds[name], strict=True)]
        benchmark.extra_info[f"bf16 / {name}"] = round(statistics.median(ratios), 2)


@pytest.mark.parametrize("kv_dtype", NAMES)
@pytest.mark.parametrize("rows", [1, 32])
def test_write(benchmark: Any, kv_dtype: str, rows: int) -> None:
    storage = KVStorage(1, 8, BLOCK, 3, 64, KV_DTYPES[kv_dtype], CPU)
    x = torch.randn(rows, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = torch.arange(rows)
    benchmark.pedantic(storage.write, (0, x, x, slots), rounds=50, iterations=20, warmup_rounds=1)
    assert storage.export([0]).shape[-1] == 64 + (0 if kv_dtype == "bf16" else 2)
