"""Engines in processes of their own, asked by messages, and any of them may die."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch

from harness.engine_facts import engine_facts, time_linear_layers
from harness.limits import Peaks, cost_of_step
from harness.linear_stages import Record
from harness.memory import PeakMemory
from harness.probe import peaks
from harness.steps import Tick
from harness.system.base import SystemUnderTest
from harness.warm_up import WarmUp, warm_up_workers
from impls.build import KV_DTYPES, construct, kv_dtype_name
from impls.models.source import ModelSource
from impls.seams import Topology
from impls.user_cache import cache_dir
from workloads.stream import RequestStream


class WorkersUnderTest(SystemUnderTest):
    """They all have the same weights and kernels: what the first one says of those holds for each.

    RuntimeError if a worker has died already.
    """

    def __init__(self, workers: Topology, config: Mapping[str, Any], source: ModelSource) -> None:
        super().__init__(workers, config, source, PeakMemory(str(config["device"]["name"]), workers))
        self._workers = workers
        element_bytes = KV_DTYPES[kv_dtype_name(config)].itemsize
        facts = workers.call(partial(engine_facts, kv_element_bytes=element_bytes))
        self.weights_bytes = sum(known.weights_bytes for known in facts)
        self.kernels, self.emulated, self.speculation = facts[0].kernels, facts[0].emulated, facts[0].speculation
        self.step_cost = partial(cost_of_step, facts[0].models)
        if not workers.alike:
            self.max_num_seqs = None

    def warm_up(self, stream: RequestStream, tick: Tick) -> WarmUp:
        return warm_up_workers(self._workers, stream, tick)

    def peaks(self) -> Peaks:
        device = str(self.config["device"]["name"])
        method = construct(self.config["precision"], device=torch.device(device))
        return peaks(device, method, cache_dir())

    @property
    def pids(self) -> Sequence[int]:
        return self._workers.pids

    @property
    def deaths(self) -> Mapping[str, str]:
        return self._workers.deaths

    def time_linear_layers(self) -> tuple[list[Record] | None, list[str]]:
        (found,) = self._workers.call(time_linear_layers, first_only=True)
        stages: tuple[list[Record] | None, list[str]] = found
        return stages

    def notes(self, requests: pd.DataFrame, steps: pd.DataFrame) -> list[str]:
        found = super().notes(requests, steps)
        if (route := self._workers.transfer_route) and requests["kv_transfer_bytes"].notna().any():
            found.append(f"{route}: keys and values pass between processes of one host, over no network")
        return found
