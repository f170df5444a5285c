"""What a command means: its arms composed, settled for this machine, validated, ordered: the plan of a study."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.adaptive import MIN_TRIALS
from harness.compose import compose_arm, compose_config, hydra_session, parse
from harness.errors import BadInput
from harness.fork_server import import_ahead
from harness.plan import NAME, PlannedArm, Setting, block_order, find_baseline, plan_arms, read_arms, trial_seed
from harness.records import SCHEMA_VERSION, encode
from harness.texts import one_line

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


@hydra_session()  # one for all arms: each file of conf/ is parsed once
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
    if {"study.trials", "study.half_width"} <= {*keys}:
        raise BadInput(
            "study.trials: an adaptive study (study.half_width) decides itself, up to study.max_trials; "
            "allowed: one of the two"
        )
    for override in parsed:
        key = override.get_key_element()
        if key == "study.arms":
            given_arms.append(override.value())
        elif override.is_discrete_sweep():
            swept.append([Setting(key, str(value)) for value in override.sweep_string_iterator()])
            if not swept[-1]:
                raise BadInput(f"{override.input_line}: sweeps over nothing; allowed: {key}=a,b or range()")
        elif override.is_sweep_override():
            raise BadInput(f"{override.input_line}: an interval has no end of values; allowed: {key}=a,b or range()")
        else:
            base.append(Setting(key, override.get_value_element_as_str()))
    whole = compose_config(tuple(map(str, base)))
    if not isinstance(whole["seed"], int):
        raise BadInput(f"seed={whole['seed']}: must be a whole number; for example 0")
    for key in ("trials", "max_trials", "stall_s"):
        if whole["study"][key] is None:
            raise BadInput(f"study.{key}=null: must be a number; for example 5")
    name = whole["study"]["name"]
    if not NAME.fullmatch(str(name)):
        raise BadInput(f"study.name={name}: a study's name is also a folder's: letters, digits and . = + - _ only")
    specs = read_arms(given_arms[0] if given_arms else whole["study"]["arms"])
    arms = plan_arms(base, swept, specs, most_trials(whole["study"]))
    configs = {arm.name: _compose_planned(arm) for arm in arms}
    for arm, config in configs.items():
        _check_waits(arm, config, whole["study"]["stall_s"])
    return Composed(whole, arms, configs, find_baseline(whole["study"]["baseline"], arms, specs))


def most_trials(study: Mapping[str, Any]) -> int:
    """Of one arm. BadInput if an adaptive study may not run as many as its rule needs."""
    if study["half_width"] is None:
        return int(study["trials"])
    if study["max_trials"] < MIN_TRIALS:
        raise BadInput(
            f"study.max_trials={study['max_trials']}: an adaptive study (study.half_width) stops after at least "
            f"{MIN_TRIALS} trials; nearest: {MIN_TRIALS}"
        )
    return int(study["max_trials"])


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
        "trials": most_trials(study),
        "half_width": study["half_width"],
        "stall_s": study["stall_s"],
        "baseline": composed.baseline,
        "arms": {
            arm.name: {
                "overrides": list(arm.overrides),
                "versus": arm.versus,
                "trials": arm.trials,
                "reasons": validate(configs[arm.name]),
                "fingerprints": fingerprints(configs[arm.name]),
                "config": encode(configs[arm.name]),
            }
            for arm in composed.arms
        },
        "order": block_order(composed.arms, seed, most_trials(study)),
    }


def resolve(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is `auto` or relative becomes definite, once for all arms. BadInput if that cannot be.

    The user's cache is asked for first: without it no model is fetched or converted, and every trial would fail alike.
    """
    from harness.arm import resolve_study  # imports torch: a mistake in the command is told without that wait
    from impls.user_cache import make_cache

    try:
        make_cache()
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


def fingerprints(config: Mapping[str, Any]) -> dict[str, str]:
    """Of the files that an arm reads, models and trace: a resumed study must find them unchanged.

    BadInput for a trace that is gone.
    """
    from harness.arm import model_fingerprints
    from workloads.trace import trace_fingerprint

    found, path = model_fingerprints(config), config["workload"].get("path")
    try:
        return found | ({"trace": trace_fingerprint(Path(str(path)).expanduser())} if path else {})
    except ValueError as error:
        raise BadInput(one_line(str(error))) from error


@hydra_session()
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
        arm = plan["arms"][name]
        difference = _first_difference(arm["config"], encode(config))
        if not difference and "fingerprints" in arm:
            now = fingerprints(config)
            known = {role: now.get(role) for role in arm["fingerprints"]}  # an older plan tells of fewer
            difference = _first_difference(arm["fingerprints"], known, "fingerprint of the")
        if difference:
            raise BadInput(f"arm {name} is no longer what study.json records: {difference}; start a new run")
    return configs


def _check_waits(arm: str, config: Mapping[str, Any], stall_s: float) -> None:
    """A batch that waits for company runs no step, and then a long one: half of what would be a hang at most. So it is
    with a worker that waits for another."""
    waits = {"batching.timeout_s": config["batching"].get("timeout_s")}
    if config["topology"].get("transfer") == "distributed":
        waits["topology.transfer_timeout_s"] = config["topology"]["transfer_timeout_s"]
    for option, timeout_s in waits.items():
        if isinstance(timeout_s, int | float) and timeout_s > stall_s / 2:
            raise BadInput(
                f"arm {arm}: {option}={timeout_s}: must be at most half of study.stall_s={stall_s}, the seconds "
                f"without a step that are a hang; nearest: {stall_s / 2:g}"
            )


def _compose_planned(arm: PlannedArm) -> dict[str, Any]:
    try:
        return compose_arm(arm.overrides)
    except BadInput as error:
        raise BadInput(f"arm {arm.name}: {error}") from error


def _first_difference(recorded: Any, now: Any, path: str = "") -> str | None:
    if isinstance(recorded, Mapping) and isinstance(now, Mapping):
        for key in [*recorded, *(k for k in now if k not in recorded)]:
            below = _first_difference(recorded.get(key), now.get(key), f"{path}.{key}" if path else str(key))
            if below:
                return below
        return None
    return None if recorded == now else f"{path} was {recorded}, is {now}"
