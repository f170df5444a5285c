"""Where the keys and values of preempted sequences wait: host memory."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.seams import BlockStorage, Fetch, SwapSpace


class HostSwap(SwapSpace):
    """Copies whole blocks of every storage (a draft model's layers lie in the same blocks) out and back.

    A sequence that another engine has begun waits alike: what it `expect`s is fetched when it is swapped in, of the
    first storage only (a draft model computes its own anew).

    ``route`` says what a copy crosses. On a CPU it stays in host memory, so its time says nothing about a GPU's bus.
    From a GPU it goes to pinned memory, all layers at once, in the order of what else is queued there.
    """

    def __init__(self, storages: Seq[BlockStorage], device: torch.device, waits: bool = True) -> None:
        """waits: return when a copy is done, so that its time is known; else when a GPU has it in its queue."""
        self.route = "host to host" if device.type == "cpu" else f"{device.type} to pinned host memory"
        self._storages, self._device = tuple(storages), device
        self._waits = waits and device.type != "cpu"
        self._kept: dict[str, list[Tensor]] = {}
        self._expected: dict[str, Fetch] = {}

    def expect(self, seq_id: str, fetch: Fetch) -> None:
        self._expected[seq_id] = fetch

    def swap_out(self, seq_id: str, blocks: Seq[int]) -> int:
        self._kept[seq_id] = [self._to_host(storage.export(blocks)) for storage in self._storages]
        self._settle()
        return sum(data.nbytes for data in self._kept[seq_id])

    def _to_host(self, data: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return data
        return torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data, non_blocking=True)

    def _settle(self) -> None:
        if self._waits:
            torch.cuda.synchronize(self._device)

    def swap_in(self, seq_id: str, blocks: Seq[int]) -> int:
        if (fetch := self._expected.pop(seq_id, None)) is not None:
            return fetch(self._storages[0], blocks)
        kept = self._kept.pop(seq_id)
        for storage, data in zip(self._storages, kept, strict=True):
            storage.import_(blocks, data)
        self._settle()
        return sum(data.nbytes for data in kept)

    def copy(self, blocks: Seq[tuple[int, int]]) -> None:
        if blocks:
            sources, targets = zip(*blocks, strict=True)
            for storage in self._storages:
                storage.import_(targets, storage.export(sources))

    def drop(self, seq_id: str) -> None:
        self._kept.pop(seq_id, None)
        self._expected.pop(seq_id, None)

    @property
    def kept_bytes(self) -> int:
        return sum(data.nbytes for kept in self._kept.values() for data in kept)
