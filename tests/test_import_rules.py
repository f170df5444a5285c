"""Who may import whom (the contracts of pyproject.toml), and that a technique needs no edit of the engine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[1]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_contracts_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert lint_imports(config_filename="pyproject.toml", no_cache=True) == EXIT_STATUS_SUCCESS


@pytest.mark.parametrize("path", sorted((ROOT / "workloads").rglob("*.py")), ids=lambda p: p.stem)
def test_workloads_know_of_the_engine_only_its_requests(path: Path) -> None:
    foreign = {name for name in imports(path) if name.split(".")[0] in ("impls", "harness")}
    assert all(name == "impls" or name.startswith("impls.request") for name in foreign)


@pytest.mark.parametrize("path", sorted((ROOT / "harness" / "report").rglob("*.py")), ids=lambda p: p.stem)
def test_the_report_reads_records_never_a_live_engine(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in ("impls", "workloads", "torch")}
