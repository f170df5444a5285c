"""A run's folder: its plan written down once, held by one process, resumed from what is recorded in it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from harness.adaptive import METRIC, MIN_TRIALS, needs_more
from harness.compose import parse
from harness.errors import BadInput
from harness.records import RecordError, decode_numbers, read_json, write_json
from harness.study import Plan, compose_study, plan_study, planned_configs

RUNS = Path("results") / "runs"
PLAN_FILE = "study.json"
LOCK_FILE = ".lock"
KEPT = ("ok", "not_run")  # what a resumed study does not run again


@contextmanager
def open_run(overrides: Sequence[str]) -> Iterator[tuple[Path, Plan]]:
    """The run's folder, its plan written, held by this process alone. `run_dir=` with a plan in it resumes it."""
    wanted = [o for o in parse(overrides) if o.key_or_group == "run_dir"]
    value = wanted[-1].value() if wanted else None
    if value is not None and not isinstance(value, str):
        raise BadInput(f"run_dir={value}: must be a folder's path")
    run_dir = Path(value).absolute() if value else None
    given = [o for o in overrides if o not in {w.input_line for w in wanted}]
    if run_dir is not None and (run_dir / PLAN_FILE).is_file():
        with _held(run_dir):
            yield run_dir, _recorded_plan(run_dir, given)
        return
    plan = plan_study(given)
    if run_dir is None:
        run_dir = _new_folder(plan["study"])
    elif run_dir.is_file() or (run_dir.is_dir() and any(not p.name.startswith(".") for p in run_dir.iterdir())):
        raise BadInput(f"run_dir={value}: is neither a run nor empty; allowed: a run's folder, an empty or a new one")
    with _held(run_dir):
        if (run_dir / PLAN_FILE).exists():
            raise BadInput(f"run_dir={run_dir}: another run has just started there")
        write_json(run_dir / PLAN_FILE, plan)
        if value is None:
            _link_latest(run_dir)
        yield run_dir, plan


def read_plan(run_dir: Path) -> Plan:
    """BadInput, naming the file, if it is not a plan."""
    try:
        return read_json(run_dir / PLAN_FILE)
    except RecordError as error:
        raise BadInput(str(error)) from error


def recorded_status(run_dir: Path, arm: str, trial: int) -> str | None:
    """None if there is no whole record."""
    run = _recorded(run_dir, arm, trial)
    return None if run is None else str(run.get("status"))


def statuses(run_dir: Path, plan: Plan) -> dict[tuple[str, int], str | None]:
    """Every due trial's recorded status."""
    order = plan["order"][: blocks_due(run_dir, plan)]
    return {(arm, block): recorded_status(run_dir, arm, block) for block, arms in enumerate(order) for arm in arms}


def pending_blocks(run_dir: Path, plan: Plan) -> list[int]:
    """Blocks of which something is left to run."""
    return sorted({trial for (_, trial), status in statuses(run_dir, plan).items() if status not in KEPT})


def blocks_due(run_dir: Path, plan: Plan) -> int:
    """How many of the plan's blocks have to run: all, or of an adaptive study as many as its records ask for."""
    order, half_width = plan["order"], plan.get("half_width")
    if half_width is None:
        return len(order)
    values: dict[str, dict[int, float | None]] = {
        name: {} for name, arm in plan["arms"].items() if arm["trials"] == len(order) and not arm["reasons"]
    }
    versus = {name: arm["versus"] for name, arm in plan["arms"].items()}
    for block, arms in enumerate(order):
        runs = {arm: _recorded(run_dir, arm, block) for arm in arms}
        for arm, run in runs.items():
            if run is None:
                return max(block + 1, MIN_TRIALS)
            if run["emulated"]:
                values.pop(arm, None)
            elif arm in values:
                metrics = decode_numbers(run["metrics"])
                values[arm][block] = metrics.get(METRIC) if run["status"] == "ok" else None
        if not needs_more(values, plan["baseline"], versus, half_width, blocks=block + 1, max_trials=len(order)):
            return block + 1
    return len(order)


def _recorded(run_dir: Path, arm: str, trial: int) -> dict[str, Any] | None:
    try:
        return read_json(run_dir / arm / str(trial) / "run.json")
    except RecordError:
        return None


def _recorded_plan(run_dir: Path, given: Sequence[str]) -> Plan:
    """The plan to resume. BadInput names the given options that do not agree with it."""
    plan = read_plan(run_dir)
    recorded = list(plan["overrides"])
    differing = [o for o in given if o not in recorded and not o.startswith("hydra") and not _agrees(recorded, o)]
    if differing:
        raise BadInput(
            f"run_dir={run_dir}: {', '.join(differing)} is not what was recorded; allowed: the recorded command "
            f"({plan['command']}), or a new run_dir"
        )
    planned_configs(plan)
    return plan


def _agrees(recorded: Sequence[str], option: str) -> bool:
    """Does the recorded command mean the same with this option in it?"""
    key = parse([option])[0].key_or_group
    others = [o for o in recorded if parse([o])[0].key_or_group != key]
    try:
        return bool(compose_study([*others, option]).meaning() == compose_study(recorded).meaning())
    except BadInput:
        return False


@contextmanager
def _held(run_dir: Path) -> Iterator[None]:
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run_dir / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BadInput(f"run_dir={run_dir}: another run is writing there; allowed: a new run_dir, or wait") from error
    try:
        yield
    finally:
        lock.release()


def _new_folder(study: str) -> Path:
    started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    parent = (RUNS / study).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 1000):
        folder = parent / (started if attempt == 1 else f"{started}-{attempt}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise BadInput(f"{parent}: a thousand runs have started in this second")


def _link_latest(run_dir: Path) -> None:
    link = run_dir.parent / "latest"
    temporary = run_dir.parent / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run_dir.name, target_is_directory=True)
    os.replace(temporary, link)
