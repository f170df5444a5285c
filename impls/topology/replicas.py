"""Several whole engines behind a round-robin router: what disaggregation has to beat at equal cores."""

from __future__ import annotations

from typing import Any

from impls.seams import Arm, Clock, EngineBuilder
from impls.seams.topology import Config
from impls.topology.options import count_reasons, shown_late, worker_config
from impls.topology.workers import WorkerGroup


class Replicas(WorkerGroup):
    """``workers`` engines, each with its share of the KV budget and ``threads`` CPU threads (None: the device's)."""

    def __init__(
        self,
        *,
        workers: int,
        threads: int | None,
        arm: Config,
        builder: EngineBuilder,
        clock: Clock,
        max_model_len: int,
    ) -> None:
        configs = self.worker_configs(arm)
        super().__init__(configs, entries=list(configs), builder=builder, clock=clock)

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        options = arm.axes["topology"]
        return count_reasons("topology", options) + shown_late(arm.axes["batching"])

    @classmethod
    def worker_configs(cls, config: Config) -> dict[str, dict[str, Any]]:
        options = config["topology"]
        workers = int(options["workers"])
        return {
            f"replica{i}": worker_config(config, share=1 / workers, threads=options["threads"]) for i in range(workers)
        }
