"""docs/measurement.md: every fault of the list has a row, and every test that the page names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "measurement.md").read_text("utf-8")
NODES = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))
ROWS = dict(re.findall(r"^\| (F?\d+) \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE))


@cache
def functions(path: str) -> frozenset[str]:
    body = ast.parse((TESTS / path).read_text("utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("path", "name"), NODES, ids=lambda part: part)
def test_a_test_that_the_page_names_exists(path: str, name: str) -> None:
    assert name in functions(path)


def test_every_fault_is_held_by_a_test_of_its_number_or_is_for_http() -> None:
    assert list(ROWS) == [*(f"F{n}" for n in range(1, 9)), *map(str, range(9, 49))]
    for fault, held in ROWS.items():
        numbers = [name.split("_") for _, name in re.findall(r"`([\w/]+\.py)::(\w+)`", held)]
        assert all(fault.lower() in number for number in numbers), fault
        assert numbers or held == "HTTP", fault


def test_what_is_left_to_http_is_written_down_for_it() -> None:
    later = PAGE.partition("## What a target over HTTP must do")[2]
    promised = {n for entry in re.findall(r"^- \*\*([^*]+)\.\*\*", later, re.MULTILINE) for n in entry.split(", ")}
    assert promised == {fault for fault, held in ROWS.items() if held.endswith("HTTP")}
