"""README.md: its command lines are ones that the harness understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import harness.study
from harness.compose import compose_arm
from harness.errors import BadInput
from harness.plan import PlannedArm
from harness.records import read_json
from harness.study import compose_study
from harness.summary import table_columns, table_rows
from harness.texts import times

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
OF_THE_USER = ("run_dir=", "model.path=", "workload.path=")  # files, which are not here
FIRST_TRY = ["model=tiny", "workload.num_requests=4"]


def overrides(line: str) -> list[str]:
    return shlex.split(line, comments=True)[3:]


LINES = [
    line
    for line in map(overrides, re.findall(r"^python -m harness(?: .*)?$", README, re.MULTILINE))
    if "--help" not in line and not any(override.startswith(OF_THE_USER) for override in line)
]


@pytest.fixture
def one_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line's first arm stands for all, whose options are planned nevertheless: each takes a third of a second."""
    found: list[dict[str, Any]] = []

    def compose(arm: PlannedArm) -> dict[str, Any]:
        if not found:
            found.append(compose_arm(arm.overrides))
        return found[0]

    monkeypatch.setattr(harness.study, "_compose_planned", compose)


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_every_command_line_composes(line: list[str], one_arm: None) -> None:
    composed = compose_study(line)
    assert composed.baseline in composed.configs


def test_the_lines_are_found() -> None:
    assert len(LINES) > 20 and ["study=smoke"] in LINES and ["telemetry.profiler=torch"] in LINES


def test_a_first_try_is_the_default_study_made_small(one_arm: None) -> None:
    assert f"`python -m harness {' '.join(FIRST_TRY)}`" in README
    configs = compose_study(FIRST_TRY).configs
    assert set(configs) == set(compose_study([]).configs)
    assert {config["model"]["name"] for config in configs.values()} == {"tiny"}
    assert {config["workload"]["num_requests"] for config in configs.values()} == {4}


def test_a_study_whose_arms_set_the_number_of_requests_takes_the_small_model_alone(one_arm: None) -> None:
    with pytest.raises(BadInput, match=r"workload\.num_requests"):
        compose_study(["study=preemption", *FIRST_TRY])
    assert compose_study(["study=preemption", "model=tiny"]).configs


def test_the_table_is_what_the_committed_run_printed() -> None:
    """As its records say today: `report/test_reference_records.py` holds its summary against them."""
    summary = read_json(ROOT / "results" / "reference" / "cpu" / "ladder" / "summary.json")
    block = README[README.index("## What a run prints") :].split("```")[1]
    printed = [re.split(r" {2,}", line.strip()) for line in block.strip().splitlines()]
    assert printed[0] == list(table_columns(summary))
    assert printed[1:] == [[text for text in row.values() if text] for row in table_rows(summary)]


def test_the_second_machine_s_figures_are_those_of_its_records() -> None:
    reference = ROOT / "results" / "reference" / "cpu_avx512"
    arms = read_json(reference / "ladder" / "summary.json")["arms"]
    paged = arms["paged"]
    found = [arms["continuous"]["step_ratios"], paged["step_ratios"], paged["ratios"]]
    ratios = [each["output_tokens_per_s"] for each in found]
    gains = [times(ratio["median"], ratio["low"], ratio["high"]) for ratio in ratios]
    text = " ".join(README.split())
    assert f"continuous {gains[0]}, paged {gains[1]} of that and {gains[2]} of static" in text
    runs = [run for run in read_json(reference / "beside_vllm" / "2_cores_equal.json")["runs"] if run["batch"] == 32]
    ours = [1e3 * run["decode_step_s"] for run in runs if run["system"] == "ours"]
    theirs = [1e3 * run["decode_step_s"] for run in runs if run["system"] == "vllm"]
    steps = f"{fmean(ours):.0f} ({' and '.join(f'{step:.0f}' for step in ours)}) against {fmean(theirs):.0f} ms"
    assert steps in text
