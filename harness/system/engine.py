"""One engine in this process: all of it can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from harness.driven import Driven
from harness.engine_facts import engine_facts, time_linear_layers
from harness.limits import Peaks, cost_of_step
from harness.linear_stages import Record
from harness.memory import PeakMemory
from harness.probe import peaks
from harness.quality import quality_of_arm
from harness.steps import Tick
from harness.system.base import SystemUnderTest
from harness.telemetry.options import TelemetryOptions
from harness.telemetry.profiler import Profile, profile_steps
from harness.warm_up import WarmUp, warm_up
from impls.build import KV_DTYPES, kv_dtype_name
from impls.engine import Engine
from impls.models.source import ModelSource
from impls.user_cache import cache_dir
from workloads.stream import RequestStream


class EngineUnderTest(SystemUnderTest):
    """One engine in this process."""

    def __init__(self, engine: Engine, config: Mapping[str, Any], source: ModelSource) -> None:
        super().__init__(engine, config, source, PeakMemory(str(config["device"]["name"])))
        self._engine = engine
        facts = engine_facts(engine, KV_DTYPES[kv_dtype_name(config)].itemsize)
        self.weights_bytes, self.kernels = facts.weights_bytes, facts.kernels
        self.emulated, self.speculation = facts.emulated, facts.speculation
        self.step_cost = partial(cost_of_step, facts.models)

    def warm_up(self, stream: RequestStream, tick: Tick) -> WarmUp:
        return warm_up(self._engine, stream, tick)

    def peaks(self) -> Peaks:
        method = self._engine.executor.model.method
        return peaks(str(self.config["device"]["name"]), method, cache_dir())

    def time_linear_layers(self) -> tuple[list[Record] | None, list[str]]:
        return time_linear_layers(self._engine)

    def quality(self, tick: Tick) -> tuple[dict[str, Any] | None, list[str]]:
        return quality_of_arm(self._engine, self.config, self.source, tick)

    def profile(
        self, seen: Driven, options: TelemetryOptions, *, tick: Tick, should_stop: Callable[[], bool]
    ) -> Profile:
        return profile_steps(self._engine, seen, options, tick=tick, should_stop=should_stop)
