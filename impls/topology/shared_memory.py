"""Keys and values in memory that all workers of a host look at: a consumer copies them straight out of a pool."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
from torch import Tensor

from impls.seams import BlockStorage, EngineBuilder
from impls.seams.topology import Config
from impls.topology.transfer import KVTransfer


class SharedMemoryTransfer(KVTransfer):
    """A producer's pool has no name, so nothing is left of it when the last process that sees it has ended; and it
    outlives its producer: what was written can still be taken. Nobody is waited for, so no time runs out."""

    def __init__(
        self, producers: Mapping[str, Config], consumers: Seq[str], builder: EngineBuilder, *options: Any
    ) -> None:
        super().__init__(producers, consumers, builder, *options)
        self._pools = {n: RawArray(ctypes.c_ubyte, builder.storage_bytes(config)) for n, config in producers.items()}
        self._storages: dict[str, BlockStorage] = {}

    @staticmethod
    def unsupported(device: str, num_workers: int, num_remote: int = 0) -> list[str]:
        found = []
        if device != "cpu":
            found.append(f"device={device} keeps keys and values elsewhere")
        if num_remote:
            found.append("workers on other hosts see no memory of this one")
        return [f"topology.transfer=shared_memory: {why} (distributed)" for why in found]

    @staticmethod
    def route(device: str, num_remote: int = 0) -> str:
        return "shared memory bandwidth"

    def open(self, worker: str) -> Tensor | None:
        memory = {name: torch.frombuffer(pool, dtype=torch.uint8) for name, pool in self._pools.items()}
        if worker in memory:
            return memory[worker]
        self._storages = {name: self.builder.storage(self.producers[name], pool) for name, pool in memory.items()}
        return None

    def fetch(self, source: str, blocks: Seq[int], storage: BlockStorage, into: Seq[int]) -> int:
        data = self._storages[source].export(blocks)
        storage.import_(into, data)
        return data.nbytes
