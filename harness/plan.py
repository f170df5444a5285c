"""What a study runs: arms x swept choices, their names, their order and their seeds. No Hydra, no files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import BadInput, nearest, not_allowed, unknown_key

SINGLE = "single"  # the arm of a command that sweeps nothing and names no arms
NAME = re.compile(r"[A-Za-z0-9][\w.=+-]*")  # also a folder's name
LONGEST_NAME = 200  # bytes: a file system's limit is 255
OWN_FILES = ("study.json", "summary.json", "report.html")  # of a run's folder, beside those of its arms
ARM_KEYS = ("set", "versus", "trials")
STUDY_WIDE = ("study", "run_dir", "seed", "isolation", "hydra")  # equal in all arms, or the arms were no pairs


@dataclass(frozen=True)
class Setting:
    """One override: ``key=value``, where key may be a group."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class PlannedArm:
    """``overrides`` compose the whole arm; ``versus`` names the rung below it; it runs the first ``trials`` blocks."""

    name: str
    overrides: tuple[str, ...]
    versus: str | None
    trials: int


@dataclass(frozen=True)
class ArmSpec:
    """One entry of `study.arms` as it was written."""

    name: str
    settings: tuple[str, ...]
    versus: str | None
    trials: int | None


def read_arms(arms: Any) -> list[ArmSpec]:
    """`study.arms` -> specs. BadInput if it is malformed."""
    if arms is None:
        return []
    example = 'for example study.arms={a:{set:["batching=static"]}}'
    if not isinstance(arms, Mapping):
        raise BadInput(f"study.arms={arms}: must map arm names to {{set, versus, trials}}; {example}")
    specs = []
    for raw_name, body in arms.items():
        name = str(raw_name)
        where = f"study.arms.{name}"
        if not NAME.fullmatch(name):
            raise BadInput(f"{where}: an arm's name is also a folder's: letters, digits and . = + - _ only")
        if not isinstance(body, Mapping):
            raise BadInput(f"{where}={body}: must be a mapping of set, versus, trials; {example}")
        for key in body:
            if key not in ARM_KEYS:
                raise unknown_key(f"{where}.{key}", ARM_KEYS)
        settings = body.get("set", [])
        if (
            isinstance(settings, str)
            or not isinstance(settings, Sequence)
            or not all(isinstance(s, str) and "=" in s for s in settings)
        ):
            raise BadInput(f"{where}.set={settings}: must be a list of overrides; {example}")
        versus, trials = body.get("versus"), body.get("trials")
        if versus is not None and not isinstance(versus, str):
            raise BadInput(f"{where}.versus={versus}: must name an arm; allowed: {', '.join(map(str, arms))}")
        if trials is not None and (not isinstance(trials, int) or isinstance(trials, bool) or trials < 1):
            raise BadInput(f"{where}.trials={trials}: must be a whole number of at least 1; nearest: 1")
        specs.append(ArmSpec(name, tuple(settings), versus, trials))
    return specs


def plan_arms(
    base: Sequence[Setting],
    swept: Sequence[Sequence[Setting]],
    specs: Sequence[ArmSpec],
    trials: int,
) -> list[PlannedArm]:
    """Every arm of `study.arms` at every point of the sweep, in the order written. BadInput names what conflicts.

    base: settings of the whole command; swept: the choices of each swept option.
    """
    _refuse_conflicts(base, list(itertools.chain.from_iterable(swept)), specs)
    for spec in specs:
        if spec.trials is not None and spec.trials > trials:
            raise BadInput(
                f"study.arms.{spec.name}.trials={spec.trials}: at most study.trials={trials}; nearest: {trials}"
            )
    common = tuple(str(setting) for setting in base)
    named = bool(specs)
    arms = []
    for spec in specs or [ArmSpec("", (), None, None)]:
        for point in itertools.product(*swept):
            suffix = point_name(point)
            arms.append(
                PlannedArm(
                    name="-".join(part for part in (spec.name, suffix) if part) or SINGLE,
                    overrides=(*common, *(str(s) for s in point), *spec.settings),
                    versus="-".join(p for p in (spec.versus, suffix) if p) if named and spec.versus else None,
                    trials=spec.trials or trials,
                )
            )
    _check_names(arms)
    _check_versus(arms)
    return arms


def point_name(point: Sequence[Setting]) -> str:
    """A point of the sweep as part of a name: choices of groups by their value, other values as leaf=value."""
    parts = []
    for setting in point:
        value = re.sub(r"[^\w.+-]", "_", setting.value.strip("'\""))
        leaf = setting.key.rpartition(".")[2]
        parts.append(f"{leaf}={value}" if "." in setting.key else value)
    return "-".join(parts)


def find_baseline(wanted: str | None, arms: Sequence[PlannedArm], specs: Sequence[ArmSpec]) -> str:
    """The arm that every ratio is given to: as asked for, else the first. A bare arm's name means its first point."""
    if wanted is None:
        return arms[0].name
    names = [arm.name for arm in arms]
    if wanted in names:
        return wanted
    bare = [spec.name for spec in specs]
    if wanted in bare:
        return names[bare.index(wanted) * (len(names) // len(bare))]
    raise not_allowed("study.baseline", wanted, names, "no such arm; allowed")


def block_order(arms: Sequence[PlannedArm], seed: int, trials: int) -> list[list[str]]:
    """The arms of each block in shuffled order, so that drift of the machine meets no arm more than another.

    Every second block mirrors the one before it: a steady drift then never favours the same arm twice running, which
    three equal pairs would make look like a difference (docs/statistics.md). More trials leave earlier blocks alone.
    """
    order: list[list[str]] = []
    limits = {arm.name: arm.trials for arm in arms}
    for block in range(trials):
        if block % 2:
            order.append([name for name in reversed(order[-1]) if limits[name] > block])
            continue
        names = [arm.name for arm in arms if arm.trials > block]
        generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(block, 1)))
        order.append([names[i] for i in generator.permutation(len(names))])
    return order


def trial_seed(seed: int, trial: int) -> int:
    """Child seed ``trial``: the same traffic in every arm of a block."""
    return int(np.random.SeedSequence(seed, spawn_key=(trial,)).generate_state(1)[0])


def _is_study_wide(key: str) -> bool:
    return re.split(r"[./]", key.strip("+~ "))[0] in STUDY_WIDE


def _refuse_conflicts(base: Sequence[Setting], swept: Sequence[Setting], specs: Sequence[ArmSpec]) -> None:
    for spec in specs:
        for setting in spec.settings:
            key = setting.partition("=")[0]
            if _is_study_wide(key):
                raise BadInput(f"study.arms.{spec.name}.set: {setting}: {key} is the same in every arm of a study")
    for choice in swept:
        if _is_study_wide(choice.key):
            raise BadInput(f"{choice.key}: is the same in every arm of a study; allowed: one value")
    for given in [*base, *swept]:
        arms = [s.name for s in specs if any(o.partition("=")[0].strip() == given.key for o in s.settings)]
        if arms:
            raise BadInput(
                f"{given}: the study's arms {', '.join(arms)} set {given.key} themselves; "
                f"allowed: any option that no arm sets, or study=none for a free choice"
            )


def _check_names(arms: Sequence[PlannedArm]) -> None:
    names = [arm.name for arm in arms]
    long = next((name for name in names if len(name.encode()) > LONGEST_NAME), None)
    if long is not None:
        raise BadInput(f"{long[:40]}...: an arm's name is also a folder's: at most {LONGEST_NAME} bytes")
    taken = next((name for name in names if name in OWN_FILES), None)
    if taken is not None:
        raise BadInput(f"{taken}: an arm's name is also a folder's, and this one is a file of every run")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"{twice}: two arms have this name; allowed: distinct choices (study=aa runs one arm twice)")


def _check_versus(arms: Sequence[PlannedArm]) -> None:
    below = {arm.name: arm.versus for arm in arms}
    for name, versus in below.items():
        if versus is not None and versus not in below:
            hint = nearest(versus, below)
            meant = f"; did you mean {hint}?" if hint else ""
            raise BadInput(f"study.arms.{name}.versus={versus}: no such arm; allowed: {', '.join(below)}{meant}")
    for start in below:
        path, here = [start], below[start]
        while here is not None:
            if here in path:
                raise BadInput(f"study.arms.{start}.versus: goes in a circle: {' -> '.join([*path, here])}")
            path.append(here)
            here = below[here]
