"""What a trial asks of whatever it drives, so that it need not know what that is: `SystemUnderTest`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.driven import Driven
from harness.launches import launch_notes
from harness.limits import Peaks, StepCost
from harness.linear_stages import Record
from harness.memory import PeakMemory
from harness.quality import quality_of_arm
from harness.steps import Tick
from harness.telemetry.devices import cuda_uuids
from harness.telemetry.options import TelemetryOptions
from harness.telemetry.profiler import Profile
from harness.warm_up import WarmUp
from impls.models.source import ModelSource
from impls.seams import StepStats, Target
from workloads.stream import RequestStream


class SystemUnderTest(ABC):
    """A target and what its trial's record says of it. What a kind cannot tell is null or empty, or says why.

    kernels: what computes. max_num_seqs: rows of each of its engines; None where they do not all do the same work.
    step_cost: FLOPs and bytes of a step; None where steps are not seen or not ours. memory: its peak in the window.
    """

    weights_bytes: int | None
    kernels: Mapping[str, str]
    emulated: Sequence[str] = ()
    speculation: bool = False
    step_cost: Callable[[StepStats], StepCost] | None = None

    def __init__(self, target: Target, config: Mapping[str, Any], source: ModelSource, memory: PeakMemory) -> None:
        self.target, self.config, self.source, self.memory = target, config, source, memory
        self.max_num_seqs: int | None = int(config["batching"]["max_num_seqs"])

    # --- before the window --------------------------------------------------------------------------------------------

    @abstractmethod
    def warm_up(self, stream: RequestStream, tick: Tick) -> WarmUp:
        """Every kind of step once; RuntimeError if it cannot run even one request."""

    def peaks(self) -> Peaks:
        """What the machine could reach at best in this system's arithmetic."""
        return Peaks(None, None, "unknown")

    def gpus(self) -> Sequence[Mapping[int, str]]:
        """UUID by CUDA ordinal of the GPUs on which each of its processes holds memory."""
        return [cuda_uuids()] if self.config["device"]["name"] == "cuda" else []

    @property
    def pids(self) -> Sequence[int]:
        """Processes beside this one that belong to it."""
        return ()

    # --- after it -----------------------------------------------------------------------------------------------------

    def other_hosts(self) -> dict[str, Any]:
        """What its record tells of machines other than this one."""
        return {}

    @property
    def deaths(self) -> Mapping[str, str]:
        """Which parts of it have died, and why."""
        return {}

    def time_linear_layers(self) -> tuple[list[Record] | None, list[str]]:
        """As `engine_facts.time_linear_layers`."""
        return None, []

    def quality(self, tick: Tick) -> tuple[dict[str, Any] | None, list[str]]:
        """As `quality.quality_of_arm`."""
        return quality_of_arm(None, self.config, self.source, tick)

    def profile(
        self, seen: Driven, options: TelemetryOptions, *, tick: Tick, should_stop: Callable[[], bool]
    ) -> Profile:
        """As `telemetry.profiler.profile_steps`."""
        if options.profiler == "none":
            return Profile()
        return Profile(warnings=("no profile: telemetry.profiler needs target=engine and topology=colocated",))

    def notes(self, requests: pd.DataFrame, steps: pd.DataFrame) -> list[str]:
        """What else a reader of the record has to know, of whose tables these are."""
        found = launch_notes(self.config, steps, self.speculation)
        limit = self.config["batching"].get("max_swapped_tokens")
        preempted, kept = int(steps["preempted"].sum()), int(steps["swapped_out"].sum())
        if limit is not None and preempted != kept:
            what = f"{preempted - kept} of {preempted} preempted sequences computed again what they had computed"
            found.append(f"swap space full: {what} (batching.max_swapped_tokens={limit})")
        return found
