"""Keys and values over `torch.distributed`: gloo (TCP sockets) on a CPU, NCCL between GPUs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though its module does not say so
from torch.distributed.distributed_c10d import PrefixStore

from impls.seams import BlockStorage, EngineBuilder
from impls.seams.topology import Config
from impls.topology.link import CONSUMER, MEETING, PRODUCER, Link
from impls.topology.meeting import listening
from impls.topology.transfer import KVTransfer, TransferError


class DistributedTransfer(KVTransfer):
    """A consumer asks, a thread of the producer answers while its engine goes on; the consumer waits.

    Each producer and each consumer share a process group of their own (`Link`): in one for all of them, whoever dies
    or stands still would break the exchange of the others.
    """

    def __init__(
        self, producers: Mapping[str, Config], consumers: Seq[str], builder: EngineBuilder, *options: Any
    ) -> None:
        super().__init__(producers, consumers, builder, *options)
        listener = listening(self.address)  # the store by itself would listen on every interface
        self._port = int(listener.getsockname()[1])
        self._meeting: TCPStore | None = TCPStore(
            self.address, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._links: dict[str, Link] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_meeting": None}  # whoever made it keeps the store

    @staticmethod
    def unsupported(device: str, num_workers: int, num_remote: int = 0) -> list[str]:
        found = []
        needed = {"gloo": dist.is_gloo_available()} | ({"NCCL": dist.is_nccl_available()} if device == "cuda" else {})
        found += [f"this torch was built without {name}" for name, is_there in needed.items() if not is_there]
        if device == "cuda" and (gpus := torch.cuda.device_count()) < num_workers:
            found.append(f"NCCL needs a GPU for each of {num_workers} workers, and here are {gpus}")
        return [f"topology.transfer=distributed: {why}" for why in found]

    @staticmethod
    def route(device: str, num_remote: int = 0) -> str:
        if num_remote:
            return "network bandwidth between hosts"
        return "loopback bandwidth" if device == "cpu" else "bandwidth between the GPUs of one host"

    def open(self, worker: str) -> Tensor | None:
        device = str(next(iter(self.producers.values()))["device"]["name"])
        if device == "cuda":  # NCCL has no two ranks on one GPU (`Disaggregated.devices`)
            here = [name for name in (*self.producers, *self.consumers) if name not in self.remote]
            torch.cuda.set_device(here.index(worker) if worker in here else 0)
        own = memory = None
        if (config := self.producers.get(worker)) is not None:
            memory = torch.empty(self.builder.storage_bytes(config), dtype=torch.uint8, device=device)
            own = self.builder.storage(config, memory)
        store = TCPStore(self.address, self._port, is_master=False, wait_for_workers=False, timeout=MEETING)
        own_address = _own_address(self.address, self._port)
        for producer in self.producers:  # everywhere in the same order: nobody waits in a circle
            for consumer in self.consumers:
                if worker not in (producer, consumer):
                    continue
                rank = PRODUCER if worker == producer else CONSUMER
                met = PrefixStore(f"{producer}-{consumer}", store)
                link = Link(met, rank, device, timedelta(seconds=self.timeout_s), own_address)
                if own is None:
                    self._links[producer] = link
                else:
                    threading.Thread(target=_serve, args=(link, own, memory), daemon=True).start()
        return memory

    def fetch(self, source: str, blocks: Seq[int], storage: BlockStorage, into: Seq[int]) -> int:
        link, data = self._links[source], storage.empty(len(blocks))
        link.ask(blocks)
        link.receive(data)
        storage.import_(into, data)
        return data.nbytes


def _own_address(address: str, port: int) -> str:
    """This host's, from which it reaches that one: gloo would take the one of the host's name. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((address, port))
        return str(way.getsockname()[0])


def _serve(link: Link, own: BlockStorage, memory: Tensor) -> None:
    """In a producer: give one consumer what it asks for, until it is gone. Nothing more is to be done about that here:
    its own requests fail with it."""
    if memory.is_cuda:
        torch.cuda.set_device(memory.device)  # each thread has its own
    while True:
        try:
            link.send(own.export(link.asked()))
        except TransferError:
            return
