"""How keys and values get from the worker that has computed them to the one that goes on: `KVTransfer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from torch import Tensor

from impls.seams import BlockStorage, EngineBuilder
from impls.seams.topology import Config

LOOPBACK = "127.0.0.1"  # where workers of this host find each other


class TransferError(Exception):
    """Keys and values could not be had; the message says why."""


class KVTransfer(ABC):
    """Between workers that hand over (producers, with their configs) and workers that take (consumers), by name.

    Made in the router's process, where it lives as long as its workers; a copy travels to each of them with its plan
    and is opened there. What passes is what `BlockStorage.export` gives, scales of 8-bit vectors included; the consumer
    asks for it. ``timeout_s``: how long a consumer waits for a worker that does not answer. ``remote``: those that are
    on other hosts, and reach this one at ``address``.
    """

    def __init__(
        self,
        producers: Mapping[str, Config],
        consumers: Seq[str],
        builder: EngineBuilder,
        timeout_s: float,
        remote: Seq[str] = (),
        address: str = LOOPBACK,
    ) -> None:
        self.producers, self.consumers = producers, tuple(consumers)
        self.builder, self.timeout_s = builder, timeout_s
        self.remote, self.address = tuple(remote), address

    @staticmethod
    @abstractmethod
    def unsupported(device: str, num_workers: int, num_remote: int = 0) -> list[str]:
        """Why so many workers on this kind of device, and so many more on other hosts, cannot exchange keys and values
        this way."""

    @staticmethod
    @abstractmethod
    def route(device: str, num_remote: int = 0) -> str:
        """Whose bandwidth it is that a transfer is given, for the record."""

    @abstractmethod
    def open(self, worker: str) -> Tensor | None:
        """In this worker's process, before its engine is built. A producer's memory, uint8 [storage_bytes], in which
        its engine is to keep keys and values for the others to have, between its steps and within them; a consumer has
        none. TransferError if the others cannot be reached.
        """

    @abstractmethod
    def fetch(self, source: str, blocks: Seq[int], storage: BlockStorage, into: Seq[int]) -> int:
        """In a consumer: copy ``blocks`` of the producer ``source`` to as many of ``storage``; bytes copied.

        They must be written, and stay as they are meanwhile. TransferError if ``source`` does not give them within the
        time-out; ``into`` is then as it was, and no more can be had from ``source``.
        """
