"""A target that is no engine of ours: what it says of itself is all that is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.memory import PeakMemory
from harness.steps import Tick
from harness.system.base import SystemUnderTest
from harness.warm_up import WarmUp, warm_up_foreign
from impls.models.source import ModelSource
from impls.seams import ForeignTarget
from workloads.stream import RequestStream


class ForeignUnderTest(SystemUnderTest):
    """What is no engine of this project: known by its weights, its kernels and what it emits."""

    def __init__(self, target: ForeignTarget, config: Mapping[str, Any], source: ModelSource) -> None:
        super().__init__(target, config, source, PeakMemory(str(config["device"]["name"])))
        self._foreign = target
        self.weights_bytes, self.kernels = target.weights_bytes, dict(target.kernels)

    def warm_up(self, stream: RequestStream, tick: Tick) -> WarmUp:
        return warm_up_foreign(self._foreign, stream, int(self.config["batching"]["max_num_seqs"]), tick)
