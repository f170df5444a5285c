"""A study whose trials a fake runner makes, its command line run in this process. Not a test module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.__main__ import launch_blocks, main
from harness.block import run_block
from harness.isolate import Ending
from harness.records import SCHEMA_VERSION, write_trial
from harness.run_dir import pending_blocks, read_plan

TINY = ["model=tiny", "device=cpu", "attention=sdpa", "workload/prompts=random", "workload.num_requests=4"]
SWEEP = ["study=none", "batching=static,continuous", "study.trials=3", *TINY]


class FakeRunner:
    """Stands in for the child process: writes the record that ``behave`` asks for."""

    def __init__(
        self,
        behave: Callable[[Mapping[str, Any]], str] = lambda job: "ok",
        noise: Callable[[Mapping[str, Any]], float] = lambda job: 1.0,
    ) -> None:
        self.jobs: list[Mapping[str, Any]] = []
        self._behave, self._noise = behave, noise

    def __call__(self, job: Mapping[str, Any], *, stall_s: float, on_progress: Callable[..., None]) -> Ending:
        self.jobs.append(job)
        on_progress({"phase": "measuring", "steps": 1, "output_tokens": 2, "finished": 1, "requests": 4})
        behaviour = self._behave(job)
        if behaviour == "crash":
            return Ending("RuntimeError: out of memory")
        if behaviour == "die":
            raise SystemExit(9)  # the whole harness is killed
        run = record(job, "aborted" if behaviour == "interrupt" else behaviour)
        run["metrics"]["output_tokens_per_s"] *= self._noise(job)
        write_trial(Path(job["out_dir"]), run)
        return Ending(None, interrupted=behaviour == "interrupt")

    @property
    def ran(self) -> list[tuple[str, int]]:
        return [(job["arm"], job["trial"]) for job in self.jobs]


def record(job: Mapping[str, Any], status: str) -> dict[str, Any]:
    speed = {"static": 100.0, "continuous": 250.0}.get(job["arm"], 1.0)
    return {
        "schema_version": SCHEMA_VERSION,
        **{key: job[key] for key in ("study", "arm", "trial", "seed", "config")},
        "status": status,
        "reasons": [],
        "axes": {},
        "provenance": {},
        "window": {"start_s": 0.0, "end_s": 3.0, "rule": "burst"},
        "metrics": {"output_tokens_per_s": speed, "ttft_s": {"p50": 0.25}, "itl_s": {"p50": 0.01}, "startup_s": 1.0},
        "limits": {},
        "validity": [],
        "clock": "real",
        "emulated": [],
    }


def run_dir(study: str = "none") -> Path:
    return Path("results/runs") / study / "latest"


def run_command(runner: FakeRunner, *arguments: str, through_hydra: bool = False) -> int:
    """Its exit status; run folders lie in the working directory, and nothing is made of the records."""
    def directly(run_dir: Path, overrides: Sequence[str]) -> None:
        """As Hydra's sweeper and launcher, without their composition of every block."""
        launched: list[int] = []
        while blocks := [b for b in pending_blocks(run_dir, read_plan(run_dir)) if b not in launched]:
            launched += blocks
            for block in blocks:
                run_block(run_dir, block, run_one=runner)

    def hydra_job(config: Any) -> None:
        run_block(Path(config.run_dir), int(config.block), run_one=runner)

    launch = functools.partial(launch_blocks, job=hydra_job) if through_hydra else directly
    return main(arguments, launch=launch, finish=lambda run_dir, plan: [])
