"""Who computes where: `Topology`, a target whose engines run in worker processes, and what `build` lends to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from impls.request import Request
from impls.seams.arm import Arm, Clock
from impls.seams.kv_cache import BlockStorage, KVCacheManager
from impls.seams.target import StepResult

Config = Mapping[str, Any]


class EngineBuilder(Protocol):
    """How a topology, which knows no other axis, makes engines. Picklable: a worker builds its own.

    ``config`` is one worker's, as `Topology.worker_configs` gives it. ``memory``: uint8 [storage_bytes], in which the
    keys and values are to lie; None: the engine's own.
    """

    def cache(self, config: Config) -> KVCacheManager:
        """The metadata of its cache, empty: what could be held."""

    def storage_bytes(self, config: Config) -> int: ...

    def storage(self, config: Config, memory: Tensor) -> BlockStorage:
        """The storage that an engine of this config has in ``memory``, seen from another process."""

    def fingerprint(self, config: Config) -> str:
        """Identifies the weights that an engine of this config has, on whatever machine it is made."""

    def engine(self, config: Config, clock: Clock, memory: Tensor | None) -> Any:
        """An `Engine`; with ``memory`` one whose `kv` can hold blocks beyond their sequence's end (`HeldBlocks`)."""


class Topology(ABC):
    """A `Target` made of several engines, each in a worker process.

    ``waited_s``: how long workers of other hosts were waited for, which is no part of what a start takes.
    """

    waited_s: float = 0.0

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return []

    @classmethod
    @abstractmethod
    def worker_configs(cls, config: Config) -> dict[str, dict[str, Any]]:
        """By worker's name: the arm's config with the batching policy, KV bytes and threads that are this worker's."""

    @classmethod
    def devices(cls, config: Config) -> dict[str, str]:
        """By name of each worker of this host: the device that it computes on, as torch names it. By default all share
        the first."""
        here = [name for name in cls.worker_configs(config) if name not in config["topology"].get("remote", ())]
        return dict.fromkeys(here, str(config["device"]["name"]))

    @abstractmethod
    def add_request(self, request: Request) -> None: ...

    @abstractmethod
    def step(self, until: float) -> StepResult:
        """What one worker's next step gave, waiting for it at most until the clock shows ``until``."""

    @property
    @abstractmethod
    def has_work(self) -> bool: ...

    @abstractmethod
    def abort(self, request_id: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def call(self, function: Callable[[Any], Any], *, first_only: bool = False) -> list[Any]:
        """``function(engine)`` in every worker (or in the first) at once, in the workers' order. ``function`` and what
        it returns travel between processes. RuntimeError if a worker has died."""

    @property
    @abstractmethod
    def alike(self) -> bool:
        """Do all workers do the same work, so that their rows can be counted together?"""

    @property
    def transfer_route(self) -> str | None:
        """Whose bandwidth it is at which keys and values pass between workers; None where none pass."""
        return None

    @property
    def remote(self) -> Sequence[str]:
        """Which workers are on other hosts."""
        return ()

    def clock_errors(self) -> Mapping[str, float]:
        """Of each of those: by how many seconds at most the time that it tells has been wrong so far."""
        return {}

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """The processes of this host's workers that are alive, as far as is known."""

    @property
    @abstractmethod
    def deaths(self) -> Mapping[str, str]:
        """Which workers have died, and why."""
