"""Arms of the tiny model in FP32, by our engine and by transformers, and what driving them by hand gives."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.arm import resolve_study, validate_arm
from harness.compose import compose_arm
from impls.build import build_target
from impls.models.source import ModelSource, open_model
from impls.request import Request, SamplingParams
from impls.seams import Emission, StepResult, Target

TINY = (
    *("study=none", "model=tiny", "device=cpu", "precision=fp32", "model.max_model_len=128"),
    *("kv_cache.budget=2048tokens", "batching.max_num_seqs=4"),  # 1,024 positions in FP32
)
STATIC = ("batching=static", "kv_cache=contiguous", "batching.timeout_s=0.0")
CONTINUOUS = ("batching=continuous", "kv_cache=paged")
FOREIGN = ("target=transformers",)


class Ticks:
    """A clock that shows a new time whenever it is read, so that no two events look simultaneous by chance."""

    def __init__(self) -> None:
        self.reads = 0

    def now(self) -> float:
        self.reads += 1
        return self.reads * 0.001

    def sleep_until(self, deadline_s: float) -> None:
        assert not math.isinf(deadline_s), "the target waits for ever"
        self.reads = max(self.reads, math.ceil(deadline_s / 0.001))


def resolved(*overrides: str) -> dict[str, Any]:
    """A later override takes the place of an earlier one of the same key."""
    settings = dict(override.split("=", 1) for override in (*TINY, *overrides))
    arm = compose_arm([f"{key}={value}" for key, value in settings.items()])
    return resolve_study({"arm": arm})["arm"]


def reasons(*overrides: str) -> list[str]:
    return validate_arm(resolved(*overrides))


@functools.cache
def source_of(*overrides: str) -> ModelSource:
    return open_model(resolved(*overrides)["model"])


def build(*overrides: str, clock: Any = None) -> Any:
    config = resolved(*overrides)
    assert validate_arm(config) == []
    return build_target(config, open_model(config["model"]), clock or Ticks())


def requests(lengths: list[int], outputs: list[int], **sampling: Any) -> list[Request]:
    """Random prompts of these lengths that begin differently; the end of sequence is ignored unless asked for."""
    random = np.random.default_rng(5)
    made = []
    for n, (length, output) in enumerate(zip(lengths, outputs, strict=True)):
        prompt = (n + 1, *(int(token) for token in random.integers(0, 512, length - 1)))
        options = {"ignore_eos": True, **sampling}
        made.append(Request(f"r{n}", prompt, SamplingParams(max_tokens=output, **options)))
    return made


@dataclass
class Ran:
    """What a target gave until it had nothing left to do."""

    results: list[StepResult] = field(default_factory=list)

    @property
    def emissions(self) -> list[Emission]:
        return [emission for result in self.results for emission in result.emissions]

    def of(self, request_id: str) -> list[Emission]:
        return [emission for emission in self.emissions if emission.request_id == request_id]

    def tokens(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for emission in self.emissions:
            found.setdefault(emission.request_id, []).extend(emission.token_ids)
        return found

    def endings(self) -> dict[str, str]:
        return {e.request_id: e.finish_reason for e in self.emissions if e.finish_reason is not None}


def run(target: Target, added: list[Request], max_steps: int = 2000) -> Ran:
    for request in added:
        target.add_request(request)
    ran = Ran()
    while target.has_work:
        assert len(ran.results) < max_steps
        ran.results.append(target.step(target_deadline(target)))
    return ran


def target_deadline(target: Target) -> float:
    """Far enough for any step of the tiny model, by `Ticks` and by a real clock alike."""
    clock: Any = getattr(target, "_clock", None) or getattr(target, "clock", None)
    return float(clock.now()) + 60.0
