from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from impls.kv_cache.host_swap import HostSwap
from impls.kv_cache.storage import KVStorage

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def storage(dtype: torch.dtype, num_layers: int = 2) -> KVStorage:
    held = KVStorage(num_layers, 6, 2, 3, 4, dtype, CPU)
    held.make_resident()
    for layer in range(num_layers):
        x = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(layer))
        held.write(layer, x, -x, torch.arange(12))
    return held


def bits(held: KVStorage) -> torch.Tensor:
    return held.export(range(6)).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_exported_lies_by_layer_then_kind_then_block(dtype: torch.dtype) -> None:
    held = storage(dtype)
    data = held.export([4, 1])
    assert data.is_contiguous() and data.shape[:4] == (2, 2, 2, 2)
    for layer in range(2):
        for kind, cache in enumerate((held.k(layer), held.v(layer))):
            values = cache if isinstance(cache, torch.Tensor) else cache.values
            kept = data[layer, kind].view(torch.uint8)[..., : 4 * dtype.itemsize]
            assert torch.equal(kept, values.view(torch.uint8)[[4, 1]])
    assert data.view(torch.uint8).unique().numel() > 20, "equal blocks would prove nothing"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_sequences_change_places(dtype: torch.dtype) -> None:
    """Out before in, of a model and of a smaller one that drafts, whose layers lie in the same blocks."""
    storages = [storage(dtype), storage(dtype, num_layers=1)]
    before = [bits(held) for held in storages]
    swap = HostSwap(storages, CPU)
    size = swap.swap_out("a", [0, 5])
    assert swap.swap_out("b", [2, 3]) == size and swap.kept_bytes == 2 * size
    for held in storages:
        held.make_resident()
    assert swap.swap_in("b", [0, 5]) == size == swap.swap_in("a", [3, 2])
    assert swap.kept_bytes == 0
    for held, was in zip(storages, before, strict=True):
        now = bits(held)
        assert torch.equal(now[:, :, [0, 5, 3, 2]], was[:, :, [2, 3, 0, 5]])
        assert not now[:, :, [1, 4]].any()


@pytest.fixture
def a_gpu_of_ram(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Storages that say they are on CUDA and lie on the CPU, where nothing can be pinned; what was asked of torch."""
    asked: list[str] = []
    empty, copy = torch.empty, torch.Tensor.copy_

    def pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.extend(["pinned"] * pin_memory)
        return empty(*size, **options)

    def copied(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        asked.extend(["queued"] * non_blocking)
        return copy(self, source, non_blocking)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append("waited"))
    return lambda: [asked.pop(0) for _ in range(len(asked))]


@pytest.mark.parametrize("waits", [True, False])
def test_from_a_gpu_it_goes_to_pinned_memory_in_one_copy(waits: bool, a_gpu_of_ram: Callable[[], list[str]]) -> None:
    held = storage(torch.bfloat16)
    before = bits(held)
    swap = HostSwap([held], torch.device("cuda"), waits=waits)
    assert swap.route == "cuda to pinned host memory"
    a_gpu_of_ram()
    swap.swap_out("a", [1, 2])
    assert a_gpu_of_ram() == ["pinned", "queued"] + ["waited"] * waits
    held.make_resident()
    swap.swap_in("a", [1, 2])
    assert a_gpu_of_ram() == ["waited"] * waits
    assert torch.equal(bits(held)[:, :, 1:3], before[:, :, 1:3])
