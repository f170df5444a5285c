"""Arms x sweep, names, conflicts, order and seeds: pure functions."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.errors import BadInput
from harness.plan import (
    ArmSpec,
    PlannedArm,
    Setting,
    block_order,
    find_baseline,
    plan_arms,
    read_arms,
    trial_seed,
)

STATIC = {"set": ["batching=static"]}


def settings(*texts: str) -> list[Setting]:
    return [Setting(*text.split("=", 1)) for text in texts]


def planned(name: str, trials: int = 3, versus: str | None = None) -> PlannedArm:
    return PlannedArm(name, (), versus, trials)


def test_arms_are_crossed_with_the_sweep_and_versus_stays_at_its_point() -> None:
    above = {"set": ["batching=continuous"], "versus": "static", "trials": 1}
    specs = read_arms({"static": STATIC, "continuous": above})
    sweep = [settings("workload.arrivals.rate=1", "workload.arrivals.rate=2")]
    arms = plan_arms(settings("seed=3"), sweep, specs, trials=4)
    assert [(a.name, a.versus, a.trials) for a in arms] == [
        ("static-rate=1", None, 4),
        ("static-rate=2", None, 4),
        ("continuous-rate=1", "static-rate=1", 1),
        ("continuous-rate=2", "static-rate=2", 1),
    ]
    assert arms[2].overrides == ("seed=3", "workload.arrivals.rate=1", "batching=continuous")
    assert find_baseline("continuous", arms, specs) == "continuous-rate=1"
    assert find_baseline("continuous-rate=2", arms, specs) == "continuous-rate=2"


def test_a_free_sweep_names_arms_by_its_choices_and_starts_with_the_baseline() -> None:
    batching = settings("batching=static", "batching=continuous")
    sweep = [batching, settings("kv_cache.block_size=16", "kv_cache.block_size=32")]
    arms = plan_arms([], sweep, [], trials=2)
    assert [a.name for a in arms] == [
        "static-block_size=16",
        "static-block_size=32",
        "continuous-block_size=16",
        "continuous-block_size=32",
    ]
    assert find_baseline(None, arms, []) == "static-block_size=16"


def test_nothing_swept_is_one_arm() -> None:
    (arm,) = plan_arms(settings("batching=static"), [], [], trials=1)
    assert arm == PlannedArm("single", ("batching=static",), None, 1)


def test_a_name_is_always_a_single_folder() -> None:
    (arm, _) = plan_arms([], [settings("model.path='/a/b c'", "model.path=../x")], [], trials=1)
    assert arm.name == "path=_a_b_c"


@pytest.mark.parametrize(
    ("base", "sweep"),
    [(["batching=static"], []), ([], [["batching=static", "batching=continuous"]])],
)
def test_an_option_that_arms_also_set_is_refused_naming_them(base: list[str], sweep: list[list[str]]) -> None:
    specs = [ArmSpec("p", ("batching=static",), None, None), ArmSpec("q", ("batching=continuous",), None, None)]
    with pytest.raises(BadInput, match=r"batching=static: the study's arms p, q set batching"):
        plan_arms(settings(*base), [settings(*choices) for choices in sweep], specs, trials=1)


def test_an_option_below_a_group_that_an_arm_chooses_is_no_conflict() -> None:
    specs = [ArmSpec("p", ("batching=static",), None, None)]
    (arm,) = plan_arms(settings("batching.max_num_seqs=8"), [], specs, trials=1)
    assert arm.overrides == ("batching.max_num_seqs=8", "batching=static")


@pytest.mark.parametrize("key", ["seed", "study.trials", "isolation", "hydra/launcher"])
def test_what_all_arms_share_is_neither_swept_nor_set_by_an_arm(key: str) -> None:
    with pytest.raises(BadInput, match="same in every arm"):
        plan_arms([], [settings(f"{key}=1", f"{key}=2")], [], trials=1)
    with pytest.raises(BadInput, match="same in every arm"):
        plan_arms([], [], [ArmSpec("p", (f"{key}=1",), None, None)], trials=1)


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ([1], "must map arm names"),
        ({"a": ["batching=static"]}, r"study\.arms\.a=.*must be a mapping"),
        ({"a": {"sets": []}}, r"study\.arms\.a\.sets.*did you mean study\.arms\.a\.set\?"),
        ({"a": {"set": "batching=static"}}, "must be a list of overrides"),
        ({"a": {"set": ["batching"]}}, "must be a list of overrides"),
        ({"a": {"set": [], "trials": 0}}, r"study\.arms\.a\.trials=0.*nearest: 1"),
        ({"a": {"set": [], "trials": True}}, r"study\.arms\.a\.trials=True"),
        ({"a": {"set": [], "versus": 3}}, r"study\.arms\.a\.versus=3"),
        ({"a/b": STATIC}, "letters, digits"),
        ({"..": STATIC}, "letters, digits"),
    ],
)
def test_malformed_arms_are_refused(arms: object, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_arms(arms)


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ({"a": STATIC, "b": {**STATIC, "versus": "c"}}, r"study\.arms\.b\.versus=c: no such arm; allowed: a, b"),
        ({"alpha": STATIC, "b": {**STATIC, "versus": "alpa"}}, "did you mean alpha"),
        ({"a": {**STATIC, "versus": "a"}}, "circle: a -> a"),
        ({"a": {**STATIC, "versus": "b"}, "b": {**STATIC, "versus": "a"}}, "circle: a -> b -> a"),
        ({"a": {**STATIC, "trials": 4}}, r"at most study\.trials=3; nearest: 3"),
    ],
)
def test_arms_that_do_not_fit_together_are_refused(arms: object, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        plan_arms([], [], read_arms(arms), trials=3)


@pytest.mark.parametrize("name", ["study.json", "summary.json", "report.html", "a" * 201, "\u6587" * 70])
def test_a_name_that_cannot_be_its_folder_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="also a folder's"):
        plan_arms([], [], read_arms({name: STATIC}), trials=1)


def test_two_arms_of_one_name_are_refused() -> None:
    with pytest.raises(BadInput, match="static: two arms"):
        plan_arms([], [settings("batching=static", "batching=static")], [], trials=1)


def test_an_unknown_baseline_names_the_nearest_arm() -> None:
    with pytest.raises(BadInput, match=r"study\.baseline=statik.*did you mean static\?"):
        find_baseline("statik", [planned("static"), planned("paged")], [])


def test_every_block_holds_each_of_its_arms_once() -> None:
    arms = [planned("a"), planned("b"), planned("c", trials=1)]
    order = block_order(arms, seed=1, trials=3)
    assert [sorted(block) for block in order] == [["a", "b", "c"], ["a", "b"], ["a", "b"]]
    assert order == block_order(arms, seed=1, trials=3)


def test_the_order_is_shuffled_evenly() -> None:
    arms = [planned(name, trials=300) for name in "abc"]
    order = block_order(arms, seed=5, trials=300)
    orders = Counter(tuple(block) for block in order)
    assert len(orders) == 6 and min(orders.values()) > 25  # 50 expected of each
    assert order != block_order(arms, seed=6, trials=300)


def test_every_second_block_mirrors_the_one_before_it() -> None:
    arms = [planned("a", trials=6), planned("b", trials=3), planned("c", trials=6), planned("d", trials=2)]
    order = block_order(arms, seed=3, trials=6)
    assert order[1] == order[0][::-1] and sorted(order[1]) == list("abcd")
    assert order[3] == [name for name in order[2][::-1] if name != "b"] and sorted(order[3]) == list("ac")
    assert block_order(arms, seed=3, trials=5) == order[:5]


def test_trial_seeds_differ_between_trials_and_studies() -> None:
    seeds = {trial_seed(seed, trial) for seed in range(20) for trial in range(20)}
    assert len(seeds) == 400
    assert trial_seed(7, 2) == trial_seed(7, 2)
