"""Which combinations of options claim to be exact: all that can run, and few in which every two options meet."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine_testing import CONF, GROUPS

import harness.arm
import impls.build
from impls.batching.continuous import PREEMPTION
from impls.batching.order import ORDERS
from impls.decoding.proposers import trained_weights
from impls.decoding.proposers.eagle import EagleProposer
from impls.decoding.speculative import DRAFT_LENGTHS
from impls.models.source import ModelSource, open_model
from impls.seams import Arm, ModelShape

Combination = tuple[str, ...]  # an option of each of AXES
Option = tuple[int, str]  # an axis, by its place among AXES, and one of its options
Pair = tuple[Option, Option]  # in the order of their axes

NUM_LAYERS = 6  # of SmolLM2: its first ones, with its own final norm and head
SHAPE = ModelShape(49152, 576, 1536, NUM_LAYERS, 9, 3, 64, 8192, 100000.0, None, 1e-5, True)
MAX_MODEL_LEN = 48
BLOCK_SIZE = 4
MAX_NUM_SEQS = 3
TIGHT = 56  # tokens: less than three sequences grow to, so that they are preempted and what is cached is evicted


def _names(group: str, first: str = "") -> list[str]:
    names = {path.stem for path in (CONF / group).glob("*.yaml")} - {"auto"}
    return sorted(names, key=lambda name: (name != first, name))


# A new option of one of these is covered from the moment when it is there. The plain ones come first.
AXES: dict[str, Sequence[str]] = {
    "batching": _names("batching", first="continuous"),
    "preemption": PREEMPTION,
    "order": ORDERS,
    "kv_cache": _names("kv_cache", first="paged"),
    "prefix": _names("prefix", first="off"),
    "proposer": ["autoregressive", *_names("proposer")],
    "draft_length": DRAFT_LENGTHS,
    "attention": _names("attention", first="reference"),
    "execution": _names("execution", first="eager"),
    "overlap": ["off", "on"],
    "samples": ["1", "2"],
    "topology": _names("topology", first="colocated"),
}
# Axes that are a key of another group's option: not every option has it.
KEYS = {"preemption": "batching", "order": "batching", "draft_length": "decoding", "overlap": "execution"}
# Below every prompt: chunks tested with prompts that fit into one test nothing (vllm#55612).
BATCHED_TOKENS = {"chunked_prefill": 5}


def combination(**options: str) -> Combination:
    """The plain option of every axis but these."""
    assert options.keys() <= AXES.keys()
    return tuple(options.get(axis, plain) for axis, (plain, *_) in AXES.items())


def choices(chosen: Mapping[str, str], backend: str | None = None) -> dict[str, Any]:
    """Options of the arm, as `arm_config` takes them. ``backend``: of ``execution=compiled``."""
    own: dict[str, dict[str, Any]] = {group: {} for group in KEYS.values()}
    for key, group in KEYS.items():
        if chosen[key] != AXES[key][0]:
            own[group][key] = chosen[key]
    if "order" in own["batching"]:
        own["batching"]["ageing_tokens_per_s"] = 1e-3  # all come at once, however slow the machine is
    if chosen["batching"] in BATCHED_TOKENS:
        own["batching"]["max_num_batched_tokens"] = BATCHED_TOKENS[chosen["batching"]]
    if backend is not None and chosen["execution"] == "compiled":
        own["execution"]["backend"] = backend
    drafts = chosen["proposer"] != "autoregressive"
    found: dict[str, Any] = {
        "batching": (chosen["batching"], {"max_num_seqs": MAX_NUM_SEQS} | own["batching"]),
        "kv_cache": (chosen["kv_cache"], {} if chosen["kv_cache"] == "contiguous" else {"block_size": BLOCK_SIZE}),
        "prefix": chosen["prefix"],
        "decoding": ("speculative" if drafts else "autoregressive", own["decoding"]),
        "attention": chosen["attention"],
        "execution": (chosen["execution"], own["execution"]),
    }
    if drafts:
        found["proposer"] = (chosen["proposer"], {"num_draft_tokens": 2})
    return found


def reasons(combination: Combination) -> list[str]:
    """Why this combination cannot run on a CPU of this machine; by the options' own `validate`."""
    chosen = dict(zip(AXES, combination, strict=True))
    found = choices(chosen)
    for key, group in KEYS.items():
        name, changes = found[group]
        if key in changes and key not in _option(group, name):
            return [f"{group}={name} has no option {key}"]
    arm = _arm(chosen)
    apart = arm.axes["topology"]
    why_apart: list[str] = impls.build.locate(apart).validate(arm) if "_target_" in apart else []
    return (
        _reasons_of_proposer(chosen["proposer"], chosen["topology"]) + impls.build.validate_axes(arm) + why_apart
    )


@functools.cache
def _reasons_of_proposer(name: str, topology: str) -> list[str]:
    """One that comes with weights opens the model to find them, which takes most of a second: it is lent one."""
    if name == "autoregressive":
        return []
    plain = _arm(dict(zip(AXES, combination(proposer=name, topology=topology), strict=True)))
    option = _option("proposer", name)
    arm = replace(plain, axes={**plain.axes, "proposer": option})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_weights, "open_model", lambda config: _model())
        reasons: list[str] = impls.build.locate(option).validate(arm)
    return reasons


@functools.cache
def _model() -> ModelSource:
    return open_model(_default("model"))


@functools.cache
def _option(group: str, name: str) -> dict[str, Any]:
    return harness.arm.option(group, name)


@functools.cache
def topology(name: str) -> dict[str, Any]:
    """Two workers, each with half of the KV budget."""
    option = harness.arm.own_policies(_option("topology", name))
    return option | {"prefill": option["prefill"] | {"kv_share": 0.5}} if "prefill" in option else option


@functools.cache
def _default(group: str) -> dict[str, Any]:
    return _option(group, {"model": "smollm2_135m", "precision": "fp32", "kv_dtype": "auto"}[group])


def _arm(chosen: Mapping[str, str]) -> Arm:
    axes = {group: _default(group) for group in ("model", "precision", "kv_dtype")}
    axes |= {"proposer": _option("proposer", "ngram"), "topology": topology(chosen["topology"])}
    for group, choice in choices(chosen).items():
        if group == "proposer":  # a stand-in for any
            continue
        name, changes = choice if isinstance(choice, tuple) else (choice, {})
        axes[group] = _option(group, name) | changes
    assert axes.keys() == {*GROUPS, "topology"}
    return Arm(axes, SHAPE, MAX_MODEL_LEN, "cpu", budget_tokens(chosen) * SHAPE.kv_bytes_per_token(4), 4)


def budget_tokens(chosen: Mapping[str, str], tight: int = TIGHT) -> int:
    """Paged sequences grow into each other's room; those in one piece find room for `MAX_NUM_SEQS` of them."""
    workers = 1 if chosen["topology"] == "colocated" else 2
    if chosen["kv_cache"] != "paged":
        return workers * (64 * MAX_NUM_SEQS + 64)  # pieces are powers of two
    own = EagleProposer.kv_bytes_per_token(SHAPE, 4) if chosen["proposer"] == "eagle" else 0  # equally many blocks
    return workers * round(tight * (1 + own / SHAPE.kv_bytes_per_token(4)))


@functools.cache
def compatible() -> frozenset[Pair]:
    """Every two options that can run together. If options exclude each other they do so in pairs (a test holds that):
    two of them can meet if they do beside some prefix cache, or none, and some proposer, or none."""
    beside = [
        {"prefix": prefix, "proposer": proposer}
        for prefix in ("off", "radix")
        for proposer in ("autoregressive", "ngram")
    ]
    found = set()
    for (i, one), (j, other) in itertools.combinations(enumerate(AXES), 2):
        for a, b in itertools.product(AXES[one], AXES[other]):
            if any(not reasons(combination(**{**background, one: a, other: b})) for background in beside):
                found.add(((i, a), (j, b)))
    return frozenset(found)


def product() -> list[Combination]:
    """All combinations that can run."""
    allowed = compatible()
    rows: list[Combination] = [()]
    for axis, options in enumerate(AXES.values()):
        rows = [
            (*row, option)
            for row in rows
            for option in options
            if all(((i, other), (axis, option)) in allowed for i, other in enumerate(row))
        ]
    return rows


def covering(tries: int = 40) -> list[Combination]:
    """Few combinations in which every two options meet that can: each grows from a pair that has not met yet (the best
    of so many tries). Those in one process come first: a worker finds what they have packed and compiled."""
    rng = random.Random(1)
    missing = dict.fromkeys(sorted(compatible()))
    rows = []
    while missing:
        grown = [row for row in (_grown(rng, missing) for _ in range(tries)) if row is not None]
        best = max(grown, key=lambda row: len(missing.keys() & pairs(row)))
        rows.append(best)
        for pair in pairs(best) & missing.keys():
            del missing[pair]
    return sorted(rows, key=lambda row: row[-1] != "colocated")


def pairs(row: Combination) -> set[Pair]:
    return set(itertools.combinations(enumerate(row), 2))


def _grown(rng: random.Random, missing: Collection[Pair]) -> Combination | None:
    """Axis by axis, the option that makes most of the missing pairs; of equals the plainer. None: a dead end."""
    allowed = compatible()
    row = dict(rng.choice(list(missing)))
    for axis, options in rng.sample(list(enumerate(AXES.values())), len(AXES)):
        if axis in row:
            continue
        met = {option: [tuple(sorted(((axis, option), other))) for other in row.items()] for option in options}
        fits = [option for option in options if all(pair in allowed for pair in met[option])]
        if not fits:
            return None
        row[axis] = max(fits, key=lambda option: sum(pair in missing for pair in met[option]))
    return tuple(row[axis] for axis in range(len(AXES)))
