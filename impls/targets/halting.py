"""A call that makes tokens in a loop of its own, run a token at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

Halt = Callable[[Tensor, Any], Tensor]


class HaltingGeneration:
    """`generate` on a thread of its own that halts after every token until its caller has looked at it.

    Caller and thread never run at once. The thread outlives a batch, so that its pool of workers does too. On a GPU
    each token is copied to the host as it is made, which waits for the device once a step, as any streaming does.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[Halt], object] | None] = SimpleQueue()
        self._orders: SimpleQueue[list[bool]] = SimpleQueue()
        self._replies: SimpleQueue[list[int] | Exception | None] = SimpleQueue()
        self.is_halted = False  # a call is in flight and waits for `resume`
        self._thread = threading.Thread(target=self._run, args=(torch.get_num_threads(),), daemon=True)
        self._thread.start()

    def start(self, generate: Callable[[Halt], object]) -> list[int]:
        """Begin a call; the first token of each row. ``generate`` takes what it must use as stopping criterion."""
        self._calls.put(generate)
        tokens = self._reply()
        if tokens is None:
            raise RuntimeError("generate returned before its first token")
        return tokens

    def resume(self, ended: Seq[bool]) -> list[int] | None:
        """Let a halted call go on to the next token of each row; None: it returned, as it does when all ``ended``."""
        self._orders.put(list(ended))
        return self._reply()

    def close(self) -> None:
        """End the thread, unless a call is in flight: it then waits for ever, and ends with the process."""
        self._calls.put(None)
        if not self.is_halted:
            self._thread.join()

    def _reply(self) -> list[int] | None:
        reply = self._replies.get()
        self.is_halted = isinstance(reply, list)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _halt(self, input_ids: Tensor, scores: Any) -> Tensor:
        """The stopping criterion. input_ids: [rows, length], the new tokens last. Returns [rows]: has it ended?"""
        self._replies.put(input_ids[:, -1].tolist())
        return torch.tensor(self._orders.get(), dtype=torch.bool, device=input_ids.device)

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # OpenMP's own number belongs to each thread that computes
        while (generate := self._calls.get()) is not None:
            reply: Exception | None = None
            try:
                with torch.inference_mode():
                    generate(self._halt)
            except Exception as error:  # whatever it is, it is the caller's
                reply = error
            self._replies.put(reply)
