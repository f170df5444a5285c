"""Every rule of verifiers, allocators, prefix caches, schedulers and measurement, broken: some test must fail."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from change import Change
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
Forge = Callable[[Change | None, Sequence[str]], dict[str, Any]]


@pytest.mark.parametrize("rule", MUTANTS)
def test_the_table_is_about_code_and_tests_that_exist(rule: str) -> None:
    change, node = MUTANTS[rule]
    source = (ROOT / change.file).read_text()
    assert source.count(change.text) == 1, f"{change.file}: once, or nobody knows what is broken: {change.text}"
    assert change.text != change.replacement
    compile(source.replace(change.text, change.replacement), change.file, "exec")
    file, *names = node.partition("[")[0].split("::")
    tests = (TESTS / file).read_text()
    assert all(f"def {name}(" in tests or f"class {name}" in tests or f"{name} = " in tests for name in names)


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    command = [sys.executable, str(Path(__file__).with_name("forge.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        given, told = process.stdin, process.stdout

        def run(change: Change | None, nodes: Sequence[str]) -> dict[str, Any]:
            print(json.dumps({"change": change, "nodes": nodes}), file=given, flush=True)
            outcome: dict[str, Any] = json.loads(told.readline())
            return outcome

        yield run
        given.close()


@pytest.mark.slow
def test_unbroken_they_all_pass(forge: Forge) -> None:
    outcome = forge(None, sorted({node for _, node in MUTANTS.values()}))
    assert outcome["status"] == 0, outcome["output"]


@pytest.mark.slow
@pytest.mark.parametrize("rule", MUTANTS)
def test_a_broken_rule_is_seen(forge: Forge, rule: str) -> None:
    change, node = MUTANTS[rule]
    outcome = forge(change, [node])
    if outcome["status"] == -signal.SIGALRM:  # perhaps the machine's doing: out of time is not yet seen
        warnings.warn(f"{node} ran out of time, once: {outcome['output']}", stacklevel=1)
        outcome = forge(change, [node])
    assert outcome["status"] == 1, f"{node} does not fail with {change}: {outcome}"
