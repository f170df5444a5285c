"""A study's life: planned once, written down, run block by block, resumed from what is recorded."""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from harness.compose import compose_arm, compose_config, parse
from harness.errors import BadInput, one_line
from harness.isolate import import_ahead
from harness.plan import PlannedArm, Setting, block_order, find_baseline, plan_arms, read_arms, trial_seed
from harness.records import SCHEMA_VERSION, RecordError, encode, read_json, write_json

RUNS = Path("results") / "runs"
PLAN_FILE = "study.json"
LOCK_FILE = ".lock"
KEPT = ("ok", "not_run")  # what a resumed study does not run again

Plan = dict[str, Any]


@dataclass(frozen=True)
class Composed:
    """A command's arms, composed and checked, before anything about this machine is settled."""

    whole: dict[str, Any]
    arms: list[PlannedArm]
    configs: dict[str, dict[str, Any]]
    baseline: str

    def meaning(self) -> Any:
        """What decides a run, however the command was spelt."""
        return self.whole, [(arm.name, arm.versus, arm.trials) for arm in self.arms], self.configs, self.baseline


def compose_study(overrides: Sequence[str]) -> Composed:
    """Every arm of a command. BadInput for the first mistake."""
    base: list[Setting] = []
    swept: list[list[Setting]] = []
    given_arms: list[Any] = []
    parsed = parse(overrides)
    keys = [str(o.key_or_group) for o in parsed]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise BadInput(f"{twice}: given twice; allowed: once, or {twice}=a,b to sweep over it")
    for override in parsed:
        key = override.get_key_element()
        if key == "study.arms":
            given_arms.append(override.value())
        elif override.is_discrete_sweep():
            swept.append([Setting(key, str(value)) for value in override.sweep_string_iterator()])
        elif override.is_sweep_override():
            raise BadInput(f"{override.input_line}: an interval has no end of values; allowed: {key}=a,b or range()")
        else:
            base.append(Setting(key, override.get_value_element_as_str()))
    whole = compose_config(tuple(map(str, base)))
    specs = read_arms(given_arms[0] if given_arms else whole["study"]["arms"])
    arms = plan_arms(base, swept, specs, whole["study"]["trials"])
    configs = {arm.name: _compose_planned(arm) for arm in arms}
    return Composed(whole, arms, configs, find_baseline(whole["study"]["baseline"], arms, specs))


def plan_study(overrides: Sequence[str]) -> Plan:
    """Compose, resolve and validate every arm of a command: what `study.json` will hold. Writes nothing."""
    composed = compose_study(overrides)
    if composed.whole["isolation"] == "process":
        import_ahead()
    study, seed = composed.whole["study"], composed.whole["seed"]
    configs = resolve(composed.configs)
    check_traffic(configs, trial_seed(seed, 0))
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study["name"],
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "harness", *overrides]),
        "overrides": list(overrides),
        "seed": seed,
        "isolation": composed.whole["isolation"],
        "trials": study["trials"],
        "stall_s": study["stall_s"],
        "baseline": composed.baseline,
        "arms": {
            arm.name: {
                "overrides": list(arm.overrides),
                "versus": arm.versus,
                "trials": arm.trials,
                "reasons": validate(configs[arm.name]),
                "config": encode(configs[arm.name]),
            }
            for arm in composed.arms
        },
        "order": block_order(composed.arms, seed, study["trials"]),
    }


def resolve(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is `auto` or relative becomes definite, once for all arms. BadInput if that cannot be."""
    from harness.arm import resolve_study  # imports torch: a mistake in the command is told without that wait

    try:
        return resolve_study(configs)
    except (ValueError, OSError) as error:
        raise BadInput(one_line(str(error))) from error


def check_traffic(configs: Mapping[str, Mapping[str, Any]], seed: int) -> None:
    """Make every distinct request stream once, so that bad traffic options are told now. BadInput says which."""
    from impls.build import max_model_len
    from impls.models.source import open_model
    from workloads import build_stream

    seen = []
    for config in configs.values():
        what = (config["workload"], config["model"])
        if what in seen:
            continue
        seen.append(what)
        try:
            source = open_model(config["model"])
            build_stream(
                config["workload"],
                seed=seed,
                tokenizer=source.tokenizer,
                max_model_len=max_model_len(config, source),
                vocab_size=source.shape.vocab_size,
            )
        except (ValueError, OSError) as error:
            raise BadInput(one_line(str(error))) from error


def validate(config: Mapping[str, Any]) -> list[str]:
    """Reasons why an arm cannot run; it is then recorded as not_run."""
    from harness.arm import validate_arm

    return [one_line(reason) for reason in validate_arm(config)]


def planned_configs(plan: Plan) -> dict[str, dict[str, Any]]:
    """The arms' configurations composed anew: a recorded config is never instantiated, only compared.

    BadInput if an arm is no longer what was recorded, for its trials would not belong together.
    """
    composed = {}
    for name, arm in plan["arms"].items():
        composed[name] = compose_arm(arm["overrides"])
        composed[name]["kv_cache"]["budget"] = int(arm["config"]["kv_cache"]["budget_bytes"])  # settled, once
    configs = resolve(composed)
    for name, config in configs.items():
        difference = _first_difference(plan["arms"][name]["config"], encode(config))
        if difference:
            raise BadInput(f"arm {name} is no longer what {PLAN_FILE} records: {difference}; start a new run")
    return configs


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
    try:
        return str(read_json(run_dir / arm / str(trial) / "run.json").get("status"))
    except RecordError:
        return None


def statuses(run_dir: Path, plan: Plan) -> dict[tuple[str, int], str | None]:
    """Every planned trial's recorded status."""
    return {
        (arm, block): recorded_status(run_dir, arm, block) for block, arms in enumerate(plan["order"]) for arm in arms
    }


def pending_blocks(run_dir: Path, plan: Plan) -> list[int]:
    """Blocks of which something is left to run."""
    return sorted({trial for (_, trial), status in statuses(run_dir, plan).items() if status not in KEPT})


def _compose_planned(arm: PlannedArm) -> dict[str, Any]:
    try:
        return compose_arm(arm.overrides)
    except BadInput as error:
        raise BadInput(f"arm {arm.name}: {error}") from error


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


def _first_difference(recorded: Any, now: Any, path: str = "") -> str | None:
    if isinstance(recorded, Mapping) and isinstance(now, Mapping):
        for key in [*recorded, *(k for k in now if k not in recorded)]:
            below = _first_difference(recorded.get(key), now.get(key), f"{path}.{key}" if path else str(key))
            if below:
                return below
        return None
    return None if recorded == now else f"{path} was {recorded}, is {now}"


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
