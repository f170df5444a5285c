"""One block: every arm once, in the planned order, each trial measured alone on its device."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from harness.console import Reporter
from harness.errors import BadInput
from harness.fork_server import in_another_process
from harness.gpus import devices_of, physical_name
from harness.isolate import Ending, run_inline, run_isolated
from harness.lock import held, shared_folder
from harness.plan import trial_seed
from harness.records import SCHEMA_VERSION, read_json, write_json, write_trial
from harness.run_dir import KEPT, RUN_FILE, read_plan, recorded_status
from harness.study import Plan, planned_configs
from harness.texts import one_line
from harness.validity import NOT_EXAMINED


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
            with device_locks(devices_of(configs[arm]).values(), run_dir, reporter.say):
                reporter.started(arm, block)
                ending = run_one(job, stall_s=plan["stall_s"], on_progress=reporter.progress)
            _settle(run_dir, plan, job, ending)
            reporter.ended(arm, block)
            if ending.interrupted:
                raise KeyboardInterrupt


@contextmanager
def device_locks(devices: Iterable[str], run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One trial at a time is measured on each of these devices of this machine, whoever started it."""
    folder = shared_folder()
    folder.mkdir(parents=True, exist_ok=True)
    names = {physical_name(device): device for device in devices}
    with ExitStack() as locks:
        for name, device in sorted(names.items()):  # in one order, or two studies could wait for each other

            def wait(holder: str, device: str = device) -> None:
                say(f"waiting: another trial is being measured on {device} ({holder})")

            file = folder / f"llm-serving-harness-{name}.lock"
            locks.enter_context(held(file, f"process {os.getpid()}, {run_dir}", wait, shared=True))
        yield


def _settle(run_dir: Path, plan: Plan, job: Mapping[str, Any], ending: Ending) -> None:
    """Make sure that the trial has a record: the child's own, or one that says why there is none. Where the child was
    ended after its window, the record says why as well.
    """
    if recorded_status(run_dir, job["arm"], job["trial"]) is not None:
        if ending.error is not None:
            _say_why_not_examined(Path(job["out_dir"]) / RUN_FILE, ending.error)
        return
    why = ending.error or "ended without a record"
    if ending.interrupted:
        _record(job, "aborted", [why])
    else:
        _record(job, "failed", [why])


def _say_why_not_examined(path: Path, error: str) -> None:
    run = read_json(path)
    if NOT_EXAMINED in run["validity"]:
        why = f"{NOT_EXAMINED} ({error})"
        write_json(path, run | {"validity": [why if text == NOT_EXAMINED else text for text in run["validity"]]})


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
