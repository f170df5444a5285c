"""A producer and a consumer of keys and values, joined by a process group of two."""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import PrefixStore

from impls.topology.transfer import TransferError

PRODUCER, CONSUMER = 0, 1  # ranks
MEETING = timedelta(minutes=5)  # for the other one to have started
IDLE = timedelta(days=365)  # until the consumer asks for something


class Link:
    """A producer and a consumer. Block ids go over gloo, keys and values over gloo or NCCL.

    ``timeout`` is for each message of a transfer; ``address``: of this host, at which the other end reaches it, which
    has `MEETING` to come, and one byte then goes the way of keys and values: what a library makes with its first
    message is made before the first transfer.

    Whatever goes wrong is a TransferError, and the end of the link: after a time-out nobody knows what is still under
    way, and both libraries close what they had open.
    """

    def __init__(self, store: PrefixStore, rank: int, device: str, timeout: timedelta, address: str) -> None:
        self._other, self._timeout = 1 - rank, timeout
        self._broken: str | None = None
        try:
            self._ids: Any = _gloo(PrefixStore("ids", store), rank, address)
            self._kv = self._ids if device == "cpu" else _nccl(PrefixStore("kv", store), rank, timeout)
        except RuntimeError as error:
            raise TransferError(_words(error)) from error
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        pass_on = self._send if rank == PRODUCER else self._receive
        _within(MEETING, lambda: pass_on(self._kv, byte, MEETING))

    def ask(self, blocks: Seq[int]) -> None:
        for message in ([len(blocks)], list(blocks)):
            self._send(self._ids, torch.tensor(message), self._timeout)

    def asked(self) -> list[int]:
        """What the consumer asks for next, as long as that may take."""
        count = torch.empty(1, dtype=torch.int64)
        self._receive(self._ids, count, IDLE)
        blocks = torch.empty(int(count), dtype=torch.int64)
        self._receive(self._ids, blocks, self._timeout)
        return [int(block) for block in blocks]

    def send(self, data: Tensor) -> None:
        self._send(self._kv, _as_bytes(data), self._timeout)

    def receive(self, data: Tensor) -> None:
        self._receive(self._kv, _as_bytes(data), self._timeout)

    def _send(self, group: Any, data: Tensor, timeout: timedelta) -> None:
        self._wait(lambda: group.send([data], self._other, 0), timeout)

    def _receive(self, group: Any, data: Tensor, timeout: timedelta) -> None:
        self._wait(lambda: group.recv([data], self._other, 0), timeout)

    def _wait(self, begin: Callable[[], Work], timeout: timedelta) -> None:
        if self._broken is None:
            try:
                if begin().wait(timeout):
                    return
                self._broken = "aborted"
            except RuntimeError as error:  # whatever it is that failed
                self._broken = _words(error)
        raise TransferError(self._broken)


def _gloo(store: PrefixStore, rank: int, address: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # its stub knows no options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = MEETING
    return gloo(store, rank, 2, options)


def _nccl(store: PrefixStore, rank: int, timeout: timedelta) -> Any:
    """A wait that blocks the host can time out and then gives up this group alone, not the process."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def _within(limit: timedelta, action: Callable[[], None]) -> None:
    """In a thread, for NCCL lets the host wait without a limit for the other end of a communicator that it makes."""
    outcome: queue.SimpleQueue[TransferError | None] = queue.SimpleQueue()

    def act() -> None:
        try:
            action()
        except TransferError as error:
            outcome.put(error)
        else:
            outcome.put(None)

    threading.Thread(target=act, daemon=True).start()
    try:
        error = outcome.get(timeout=limit.total_seconds())
    except queue.Empty:
        error = TransferError(f"no connection was made within {limit.total_seconds():g} s")
    if error is not None:
        raise error


def _as_bytes(data: Tensor) -> Tensor:
    """The same memory: neither library knows every 8-bit type."""
    return data.view(-1).view(torch.uint8)


def _words(error: RuntimeError) -> str:
    """On one line, without the place in the library's source and the trace of its calls."""
    return re.sub(r"^\[[^\]]*\] ", "", " ".join(str(error).split()))[:200]
