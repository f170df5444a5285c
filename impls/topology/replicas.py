"""Several whole engines behind a round-robin router: what disaggregation has to beat at equal cores."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from impls.seams import Arm, Clock, EngineBuilder
from impls.seams.topology import Config
from impls.topology.options import count_reasons, remote_reasons, shown_late, worker_config
from impls.topology.workers import WorkerGroup


class Replicas(WorkerGroup):
    """``workers`` engines, each with its share of the KV budget and ``threads`` CPU threads (None: the device's).
    ``remote``, ``listen``: those that are on other hosts, and where (`WorkerGroup`)."""

    def __init__(
        self,
        *,
        workers: int,
        threads: int | None,
        remote: Seq[str],
        listen: str | None,
        arm: Config,
        builder: EngineBuilder,
        clock: Clock,
        max_model_len: int,
    ) -> None:
        configs = self.worker_configs(arm)
        super().__init__(configs, entries=list(configs), builder=builder, clock=clock, remote=remote, listen=listen)

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        options = arm.axes["topology"]
        reasons = count_reasons("topology", options)
        if not reasons:
            reasons += remote_reasons(options, [f"replica{i}" for i in range(int(options["workers"]))])
        return reasons + shown_late(arm.axes["batching"])

    @classmethod
    def worker_configs(cls, config: Config) -> dict[str, dict[str, Any]]:
        options = config["topology"]
        workers = int(options["workers"])
        return {
            f"replica{i}": worker_config(config, share=1 / workers, threads=options["threads"]) for i in range(workers)
        }
