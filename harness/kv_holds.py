"""What sequences held of the KV cache, step by step, and into which parts that falls once every length is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from impls.seams import KVReservation

IntArray = npt.NDArray[np.int64]

_hold_of = attrgetter("request_id", "reserved", "used", "finished")


class KVHolds:
    """Flat lists over all steps, one entry a sequence and step; ``_num`` says how many of them each step has.

    Lists, not arrays: a list takes 32 references over in a tenth of the time that an array needs to convert them.
    """

    def __init__(self) -> None:
        self._num: list[int] = []
        self._ids: list[str] = []
        self._reserved: list[int] = []
        self._used: list[int] = []
        self._finished: list[bool] = []

    def add(self, step: Seq[KVReservation]) -> None:
        self._num.append(len(step))
        if step:
            ids, reserved, used, finished = zip(*map(_hold_of, step), strict=True)
            self._ids += ids
            self._reserved += reserved
            self._used += used
            self._finished += finished

    def parts(
        self, columns: Mapping[str, Seq[Any]], written: Callable[[str], int], prompt: Callable[[str], int]
    ) -> dict[str, Any]:
        """The `kv_*` columns of a step: each reserved position is used, reserved-ahead or internal.

        columns: of steps, as StepStats has them. written: positions that a request has written by its end; prompt:
        those of its prompt, all that a worker for prompts alone ever writes.
        """
        n = len(self._num)
        step = np.repeat(np.arange(n), np.array(self._num, np.int64))
        final = np.array([written(request_id) for request_id in self._ids], np.int64)
        if any(columns["prefill_only"]):
            prompts = np.array([prompt(request_id) for request_id in self._ids], np.int64)
            final = np.where(np.array(columns["prefill_only"], bool)[step], prompts, final)
        reserved, filled = np.array(self._reserved, np.int64), np.array(self._used, np.int64)
        live = 1 - np.array(self._finished, np.int64)
        used = live * filled
        ahead = live * np.maximum(0, np.minimum(reserved, final) - filled)
        known = [capacity > 0 for capacity in columns["kv_capacity_tokens"]]  # else a target that shows no cache: null

        def total(part: IntArray, shared: Seq[int] | int = 0) -> list[int | None]:
            sums = np.zeros(n, np.int64)
            np.add.at(sums, step, part)
            sums -= np.array(shared, np.int64)
            return [int(value) if shown else None for value, shown in zip(sums, known, strict=True)]

        free = zip(columns["kv_free_tokens"], columns["kv_allocation_unit"], columns["waiting"], known, strict=True)
        unusable = [(tokens % unit if waiting else 0) if shown else None for tokens, unit, waiting, shown in free]
        return {
            "kv_capacity_tokens": [capacity or None for capacity in columns["kv_capacity_tokens"]],
            "kv_used_tokens": total(used, columns["kv_shared_tokens"]),  # held by several, and all of it used
            "kv_reserved_ahead_tokens": total(ahead),
            "kv_internal_tokens": total(reserved - used - ahead),
            "kv_unusable_tokens": unusable,
        }
