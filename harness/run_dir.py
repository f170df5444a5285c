"""A run's folder: its plan written down once, held by one process, resumed from what is recorded in it."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness import records
from harness.adaptive import METRIC, MIN_TRIALS, needs_more
from harness.compose import parse
from harness.errors import BadInput
from harness.lock import held
from harness.plan import NAME
from harness.records import RecordError, check_place, decode_numbers, read_json, read_trial, write_json
from harness.study import Plan, compose_study, plan_study, planned_configs
from harness.texts import one_line

RUNS = Path("results") / "runs"
PLAN_FILE = "study.json"
RUN_FILE = "run.json"
LOCK_FILE = ".lock"
KEPT = ("ok", "not_run")  # what a resumed study does not run again


@contextmanager
def open_run(overrides: Sequence[str]) -> Iterator[tuple[Path, Plan]]:
    """The run's folder, its plan written, held by this process alone. `run_dir=` with a plan in it resumes it.

    BadInput as well for whatever cannot be written there, now or by the caller: a full disk, say.
    """
    wanted = [o for o in parse(overrides) if o.key_or_group == "run_dir"]
    value = wanted[-1].value() if wanted else None
    if value is not None and not isinstance(value, str):
        raise BadInput(f"{wanted[-1].input_line}: must be one folder's path; for example run_dir={RUNS / 'mine'}")
    given = [o for o in overrides if o not in {w.input_line for w in wanted}]
    try:
        with _opened(value, given) as opened:
            yield opened
    except OSError as error:
        raise BadInput(
            f"run_dir={value or RUNS}: {one_line(str(error))}; allowed: a folder that can be written; what is "
            "recorded there is kept"
        ) from error


@contextmanager
def _opened(value: str | None, given: Sequence[str]) -> Iterator[tuple[Path, Plan]]:
    """``value``: of run_dir; ``given``: all other options."""
    run_dir = Path(value).absolute() if value else None
    if run_dir is not None and (run_dir / PLAN_FILE).is_file():
        with _held(run_dir):
            _sweep(run_dir)
            plan = _recorded_plan(run_dir, given)
            _check_records(run_dir, plan)
            yield run_dir, plan
        return
    plan = plan_study(given)
    if run_dir is None:
        run_dir = _new_folder(plan["study"])
    elif run_dir.is_file() or (run_dir.is_dir() and not (run_dir / PLAN_FILE).exists() and _holds_files(run_dir)):
        raise BadInput(f"run_dir={value}: is neither a run nor empty; allowed: a run's folder, an empty or a new one")
    with _held(run_dir):
        if (run_dir / PLAN_FILE).exists():
            raise BadInput(f"run_dir={run_dir}: another run has just started there")
        _sweep(run_dir)
        write_json(run_dir / PLAN_FILE, plan)
        if value is None:
            _link_latest(run_dir)
        yield run_dir, plan


def read_plan(run_dir: Path) -> Plan:
    """BadInput, naming the file, if it is not a plan: its arms are folders that a run replaces."""
    path = run_dir / PLAN_FILE
    try:
        plan = records.read_plan(path, resumed=True)
    except RecordError as error:
        raise BadInput(str(error)) from error
    for name in plan["arms"]:
        if not NAME.fullmatch(name):
            raise BadInput(f"{path}: arms.{name}: is no arm's name")
    references = {f"arms.{name}.versus": arm["versus"] for name, arm in plan["arms"].items()}
    for where, reference in ({"baseline": plan["baseline"]} | references).items():
        if reference is not None and reference not in plan["arms"]:
            raise BadInput(f"{path}: {where}: {one_line(reference)} is none of the plan's arms")
    if not all(arm in plan["arms"] for block in plan["order"] for arm in block):
        raise BadInput(f"{path}: order: must be lists of the plan's arms")
    return plan


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
    """How many of the plan's blocks have to run: all, or of an adaptive study as many as its records ask for.

    Never fewer than have been begun: a trial that is measured again may narrow an interval that has been wide, and what
    was run because of that is a part of the study all the same.
    """
    order, half_width = plan["order"], plan.get("half_width")
    if half_width is None:
        return len(order)
    there = [any((run_dir / arm / str(block) / RUN_FILE).exists() for arm in arms) for block, arms in enumerate(order)]
    begun = max((block + 1 for block, is_there in enumerate(there) if is_there), default=0)
    values: dict[str, dict[int, float | None]] = {
        name: {} for name, arm in plan["arms"].items() if arm["trials"] == len(order) and not arm["reasons"]
    }
    for block, arms in enumerate(order[:begun]):
        for arm in arms:
            run = _recorded(run_dir, arm, block)
            if run is None:
                return min(len(order), max(begun, MIN_TRIALS))
            if run["emulated"]:
                values.pop(arm, None)
            elif arm in values:
                metrics = decode_numbers(run["metrics"])
                values[arm][block] = metrics.get(METRIC) if run["status"] == "ok" else None
    versus = {name: arm["versus"] for name, arm in plan["arms"].items()}
    more = needs_more(values, plan["baseline"], versus, half_width, blocks=begun, max_trials=len(order))
    return min(len(order), max(begun + more, MIN_TRIALS))


def _recorded(run_dir: Path, arm: str, trial: int) -> dict[str, Any] | None:
    try:
        return read_json(run_dir / arm / str(trial) / RUN_FILE)
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


def _check_records(run_dir: Path, plan: Plan) -> None:
    """BadInput for a record that is there and that this version cannot read whole: it is not ours to throw away."""
    for folder in (run_dir / arm / str(trial) for trial, arms in enumerate(plan["order"]) for arm in arms):
        if not (folder / RUN_FILE).exists():
            continue
        try:
            check_place(read_trial(folder))
        except RecordError as error:
            raise BadInput(f"{error}; remove {folder} to measure it again") from error


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
    def refuse(holder: str) -> None:
        raise BadInput(
            f"run_dir={run_dir}: another run is writing there ({holder}); allowed: a new run_dir, or wait for its end"
        )

    run_dir.mkdir(parents=True, exist_ok=True)
    with held(run_dir / LOCK_FILE, f"process {os.getpid()}", refuse):
        yield


def _sweep(run_dir: Path) -> None:
    """Remove what a killed run left half-written: records and reports are written under such names, then renamed."""
    for pattern in (".*.tmp", "*/.*.tmp", "*/.*.old", "*/*/.*.tmp"):
        for path in run_dir.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _holds_files(folder: Path) -> bool:
    """Others than hidden ones: a lock, or what a killed run left half-written."""
    return any(not path.name.startswith(".") for path in folder.iterdir())


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
    """A convenience, which a run does without where the file system has no links (exFAT, some network shares)."""
    link = run_dir.parent / "latest"
    temporary = run_dir.parent / f".latest.{os.getpid()}"
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(run_dir.name, target_is_directory=True)
        os.replace(temporary, link)
