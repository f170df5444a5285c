"""One block: every arm once, in the planned order, each trial measured alone on its device."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from harness.console import Reporter
from harness.errors import BadInput
from harness.isolate import Ending, in_another_process, run_inline, run_isolated
from harness.lock import held, shared_folder
from harness.plan import trial_seed
from harness.records import SCHEMA_VERSION, write_trial
from harness.run_dir import KEPT, read_plan, recorded_status
from harness.study import Plan, planned_configs
from harness.texts import one_line


class RunOne(Protocol):
    """Runs one trial so that its record lies in ``job["out_dir"]``, or says why it does not."""

    def __call__(
        self, job: Mapping[str, Any], *, stall_s: float, on_progress: Callable[[Mapping[str, Any]], None]
    ) -> Ending: ...


def hydra_job(config: DictConfig) -> None:
    """What Hydra's launcher runs, here or on another machine: ``config`` names the run's folder and the block.

    Where not even a failure can be recorded (a full disk), one line and exit status 1: Hydra would go on with the next
    block, then print its stack.
    """
    try:
        run_block(Path(config.run_dir), int(config.block))
    except (BadInput, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"error: {one_line(str(error))}; resume with: python -m harness run_dir={config.run_dir}")


def run_block(run_dir: Path, block: int, run_one: RunOne | None = None) -> None:
    """Run what is not yet recorded of a block. KeyboardInterrupt after an interrupted trial has been recorded."""
    plan = read_plan(run_dir)
    configs = planned_configs(plan)
    run_one = run_one or (run_inline if plan["isolation"] == "inline" else run_isolated)
    with Reporter(run_dir, plan, block) as reporter:
        for arm in plan["order"][block]:
            if recorded_status(run_dir, arm, block) in KEPT:
                continue
            job = {
                "config": configs[arm],
                "study": plan["study"],
                "arm": arm,
                "trial": block,
                "seed": trial_seed(plan["seed"], block),
                "out_dir": str(run_dir / arm / str(block)),
            }
            if plan["arms"][arm]["reasons"]:
                _record(job, "not_run", plan["arms"][arm]["reasons"])
                reporter.ended(arm, block)
                continue
            shutil.rmtree(job["out_dir"], ignore_errors=True)  # an old failure is not this one
            with device_lock(str(configs[arm]["device"]["name"]), run_dir, reporter.say):
                reporter.started(arm, block)
                ending = run_one(job, stall_s=plan["stall_s"], on_progress=reporter.progress)
            _settle(run_dir, plan, job, ending)
            reporter.ended(arm, block)
            if ending.interrupted:
                raise KeyboardInterrupt


@contextmanager
def device_lock(device: str, run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One trial at a time is measured on a device of this machine, whoever started it."""
    name = device
    if device == "cuda":  # of those that are visible, a trial runs on the first
        name += "-" + (os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].replace("/", "_") or "0")
    folder = shared_folder()
    folder.mkdir(parents=True, exist_ok=True)

    def wait(holder: str) -> None:
        say(f"waiting: another trial is being measured on {device} ({holder})")

    with held(folder / f"llm-serving-harness-{name}.lock", f"process {os.getpid()}, {run_dir}", wait, shared=True):
        yield


def _settle(run_dir: Path, plan: Plan, job: Mapping[str, Any], ending: Ending) -> None:
    """Make sure that the trial has a record: the child's own, or one that says why there is none."""
    if recorded_status(run_dir, job["arm"], job["trial"]) is not None:
        return
    why = ending.error or "ended without a record"
    if ending.interrupted:
        _record(job, "aborted", [why])
    else:
        _record(job, "failed", [why])


def _record(job: Mapping[str, Any], status: str, reasons: list[str]) -> None:
    """A record without measurements."""
    from harness.provenance import provenance

    config = job["config"]
    figures = partial(provenance, str(config["device"]["name"]), {})
    on_gpu = config["device"]["name"] == "cuda"  # a GPU context of this process would lie beside every later trial
    write_trial(
        Path(job["out_dir"]),
        {
            "schema_version": SCHEMA_VERSION,
            **{key: job[key] for key in ("study", "arm", "trial", "seed", "config")},
            "status": status,
            "reasons": reasons,
            "axes": {k: body["name"] for k, body in config.items() if isinstance(body, Mapping) and "name" in body},
            "provenance": in_another_process(figures) if on_gpu else figures(),
            "window": {"start_s": None, "end_s": None, "rule": None},
            "metrics": {},
            "limits": {},
            "validity": [],
            "clock": "real",
            "emulated": [],
        },
    )
