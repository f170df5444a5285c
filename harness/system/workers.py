"""Engines in processes of their own, asked by messages, and any of them may die."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from harness.engine_facts import engine_facts, time_linear_layers
from harness.limits import Peaks, cost_of_step
from harness.linear_stages import Record
from harness.memory import PeakMemory
from harness.probe import peaks
from harness.provenance import hardware, versions
from harness.steps import Tick
from harness.system.base import SystemUnderTest
from harness.telemetry.devices import cuda_uuids
from harness.warm_up import WarmUp, warm_up_workers
from impls.build import KV_DTYPES, construct, kv_dtype_name, worker_configs
from impls.engine import Engine
from impls.models.source import ModelSource
from impls.seams import Topology
from impls.user_cache import cache_dir
from workloads.stream import RequestStream

CLOCK_ERROR_S = 0.001  # less says nothing about a figure in milliseconds


def _gpu_peaks(engine: Engine, kept_in: Path) -> Peaks:
    return peaks("cuda", engine.executor.model.method, kept_in)


def _gpus(engine: Engine) -> dict[int, str]:
    return cuda_uuids()


def _host(engine: Engine, device: str) -> dict[str, Any]:
    return {"hardware": hardware(device), "versions": versions()}


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
        self._hosts: dict[str, Any] = {}  # by name of each worker that is on another one
        if workers.remote:
            hosts = workers.call(partial(_host, device=str(config["device"]["name"])))
            names = worker_configs(config)
            self._hosts = {name: host for name, host in zip(names, hosts, strict=True) if name in workers.remote}

    def warm_up(self, stream: RequestStream, tick: Tick) -> WarmUp:
        return warm_up_workers(self._workers, stream, tick)

    def peaks(self) -> Peaks:
        """Of all GPUs together, which are taken to be alike. The processors of a machine are one device, and measured
        while no worker uses them: here. A GPU is measured where a context on it is open. Several hosts are not known to
        be alike.
        """
        if self._hosts:
            return super().peaks()
        if self.config["device"]["name"] == "cuda":
            one: Peaks = self._workers.call(partial(_gpu_peaks, kept_in=cache_dir()), first_only=True)[0]
            return one.times(len({uuid for held in self.gpus() for uuid in held.values()}))
        method = construct(self.config["precision"], device=torch.device("cpu"))
        return peaks("cpu", method, cache_dir())

    def gpus(self) -> Sequence[Mapping[int, str]]:
        """None where workers are on other hosts, whose counters are not read: a part of the energy is no energy."""
        if self.config["device"]["name"] != "cuda" or self._hosts:
            return []
        return self._workers.call(_gpus)

    @property
    def pids(self) -> Sequence[int]:
        return self._workers.pids

    @property
    def deaths(self) -> Mapping[str, str]:
        return self._workers.deaths

    def other_hosts(self) -> dict[str, Any]:
        if not self._hosts:
            return {}
        errors = self._workers.clock_errors()
        return {"workers": {name: {**host, "clock_error_s": errors[name]} for name, host in self._hosts.items()}}

    def time_linear_layers(self) -> tuple[list[Record] | None, list[str]]:
        (found,) = self._workers.call(time_linear_layers, first_only=True)
        stages: tuple[list[Record] | None, list[str]] = found
        return stages

    def notes(self, requests: pd.DataFrame, steps: pd.DataFrame) -> list[str]:
        found = super().notes(requests, steps)
        if (route := self._workers.transfer_route) and requests["kv_transfer_bytes"].notna().any():
            where = "on the network that joins them" if self._hosts else "of one host, over no network"
            found.append(f"{route}: keys and values pass between processes {where}")
        if self._hosts:
            names = ", ".join(self._hosts)
            found.append(f"other hosts: of {names} telemetry tells nothing; MFU, MBU and energy are left out")
        errors = {name: error for name, error in self._workers.clock_errors().items() if error > CLOCK_ERROR_S}
        for name, error_s in errors.items():
            found.append(f"another host's clock: times that {name} tells may be off by {1000 * error_s:.1f} ms")
        return found
