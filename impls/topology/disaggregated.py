"""Prefill and decode on workers of their own (DistServe, Splitwise 2024; Mooncake 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from impls.request import Request
from impls.seams import Arm, Clock, EngineBuilder, never_runs
from impls.seams.topology import Config
from impls.topology.distributed import DistributedTransfer
from impls.topology.meeting import address_of
from impls.topology.options import count_reasons, remote_reasons, shown_late, worker_config
from impls.topology.shared_memory import SharedMemoryTransfer
from impls.topology.transfer import LOOPBACK, KVTransfer
from impls.topology.workers import WorkerGroup

ROLES = ("prefill", "decode")
TRANSFERS: dict[str, type[KVTransfer]] = {"shared_memory": SharedMemoryTransfer, "distributed": DistributedTransfer}


class Disaggregated(WorkerGroup):
    """A prefill worker computes a prompt and emits its first token; a decode worker copies the keys and values and
    makes the others. So no prompt makes the sequences that decode wait, and each side batches as suits it.

    prefill, decode: ``workers``; ``threads`` of each (None: the device's); ``batching``, an option of that group (None:
    the arm's); ``max_num_seqs`` in its place; for prefill ``kv_share``, the part of the KV budget that its workers
    divide, the decode workers have the rest. transfer: one of `TRANSFERS`; transfer_timeout_s: its time-out.
    remote, listen: the workers that are on other hosts, and where they dial in (`WorkerGroup`).

    A prompt's blocks stay with the prefill worker until the decode worker that was chosen has admitted the sequence, by
    its own policy and as its own pool allows, and has copied them. So a full decode pool is felt where requests come
    in: prompts that are done fill the prefill pool, and new ones wait. What a decode worker preempts it recomputes, or
    swaps, by itself.
    """

    def __init__(
        self,
        *,
        prefill: Mapping[str, Any],
        decode: Mapping[str, Any],
        transfer: str,
        transfer_timeout_s: float,
        remote: Seq[str],
        listen: str | None,
        arm: Config,
        builder: EngineBuilder,
        clock: Clock,
        max_model_len: int,
    ) -> None:
        configs = self.worker_configs(arm)
        entries, decoders = ([name for name in configs if name.startswith(role)] for role in ROLES)
        self._decode_cache = builder.cache(configs[decoders[0]])
        self._max_model_len = max_model_len
        self._route = TRANSFERS[transfer].route(str(arm["device"]["name"]), len(remote))
        met = (remote, LOOPBACK if listen is None else address_of(listen)[0])
        producers = {name: configs[name] for name in entries}
        super().__init__(
            configs,
            entries=entries,
            decoders=decoders,
            transfer=TRANSFERS[transfer](producers, decoders, builder, transfer_timeout_s, *met),
            builder=builder,
            clock=clock,
            remote=remote,
            listen=listen,
        )

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        options = arm.axes["topology"]
        reasons = [why for role in ROLES for why in count_reasons(f"topology.{role}", options[role])]
        share = options["prefill"]["kv_share"]
        if not isinstance(share, int | float) or not 0 < share < 1:
            reasons.append(f"topology.prefill.kv_share={share}: must be a share of the KV budget above 0 and below 1")
        policies = {role: options[role]["batching"] or arm.axes["batching"] for role in ROLES}
        reasons += [why for policy in policies.values() for why in shown_late(policy)]
        if policies["decode"]["name"] == "static":
            reasons.append(
                "batching=static computes every sequence of a batch from its first position on: a decode worker needs "
                "a policy that goes on with what was computed (topology.decode.batching=continuous)"
            )
        if arm.axes.get("execution", {}).get("overlap") == "on":
            reasons.append(
                "execution.overlap=on: what a worker takes in would be counted with the step that it reports, which is "
                "not the one that it takes it in for"
            )
        if (transfer := str(options["transfer"])) not in TRANSFERS:
            reasons.append(f"topology.transfer={transfer}: must be one of {', '.join(TRANSFERS)}")
        timeout_s = options["transfer_timeout_s"]
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            reasons.append(f"topology.transfer_timeout_s={timeout_s}: must be a number of seconds above 0")
        if not reasons:
            names = [f"{role}{i}" for role in ROLES for i in range(int(options[role]["workers"]))]
            reasons += remote_reasons(options, names)
        if not reasons:
            elsewhere = len(options["remote"])
            reasons += TRANSFERS[transfer].unsupported(arm.device, len(names) - elsewhere, elsewhere)
        return reasons

    @classmethod
    def worker_configs(cls, config: Config) -> dict[str, dict[str, Any]]:
        options = config["topology"]
        share = float(options["prefill"]["kv_share"])
        configs = {}
        for role, part in zip(ROLES, (share, 1 - share), strict=True):
            chosen = options[role]
            for i in range(int(chosen["workers"])):
                configs[f"{role}{i}"] = worker_config(
                    config,
                    share=part / int(chosen["workers"]),
                    threads=chosen["threads"],
                    batching=chosen["batching"],
                    max_num_seqs=chosen["max_num_seqs"],
                )
        return configs

    @classmethod
    def devices(cls, config: Config) -> dict[str, str]:
        """A GPU for each worker where keys and values pass between GPUs (`DistributedTransfer.open`)."""
        shared = super().devices(config)
        if config["device"]["name"] != "cuda" or config["topology"]["transfer"] != "distributed":
            return shared
        return {worker: f"cuda:{rank}" for rank, worker in enumerate(shared)}

    @property
    def transfer_route(self) -> str | None:
        return self._route

    def never_runs(self, request: Request) -> str | None:
        """The prefill worker knows only of the first token: who is too long for the others is told so at once."""
        if request.sampling.max_tokens == 1:  # it ends there
            return None
        return never_runs(request, self._max_model_len, self._decode_cache, "the whole KV cache of a decode worker")
