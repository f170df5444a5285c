"""Every option that a command line can name, misspelt or given nonsense: one line that helps, exit status 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.__main__ import main
from harness.compose import CONF, compose_config, hydra_session, options

GROUPS = sorted({str(path.parent.relative_to(CONF)) for path in CONF.rglob("*.yaml") if path.parent != CONF})


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that is refused."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.fixture(autouse=True, scope="module")
def hydra_once() -> Iterator[None]:
    with hydra_session():
        yield


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_says_what_it_offers_and_what_was_meant(group: str, capsys: Any) -> None:
    choices = options(group)
    misspelt = choices[0] + "x"
    line = said([f"{group}={misspelt}"], capsys)
    assert f"{group}={misspelt}: allowed: {', '.join(choices)}; did you mean " in line


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_that_is_misspelt_is_recognised(group: str, capsys: Any) -> None:
    misspelt = group[:-1] + "x" + group[-1]
    line = said([f"{misspelt}={options(group)[0]}"], capsys)
    assert f"{misspelt}" in line and f"did you mean {group}?" in line


def leaves(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from leaves(value, here)
        elif key not in ("name", "_target_", "source") and "study.arms" not in here:
            yield here, value


LEAVES = dict(leaves(compose_config(("study=none", "model=tiny"))))
NUMBERS = [key for key, value in LEAVES.items() if isinstance(value, (int, float)) and not isinstance(value, bool)]


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(set(LEAVES) - {"run_dir"}))
def test_every_option_that_is_misspelt_is_recognised(key: str, capsys: Any) -> None:
    line = said(["study=none", "model=tiny", f"{key}x=1"], capsys)
    assert f"{key}x" in line and f"did you mean {key}?" in line


@pytest.mark.slow
@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_says_that_it_is_one(key: str, capsys: Any) -> None:
    line = said(["study=none", "model=tiny", f"{key}=lots"], capsys)
    assert f"{key}=lots: must be " in line and "number" in line


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("run_dir=a,b", ["run_dir=a,b", "must be one folder's path", "for example run_dir="]),
        ("run_dir=[a]", ["run_dir=[a]", "must be one folder's path"]),
        ("run_dir=5", ["run_dir=5", "must be one folder's path"]),
        ("study.stall_s=0", ["study.stall_s=0", "above 0", "for example 1"]),
        ("seed=-1", ["seed=-1", "must not be negative", "nearest: 0"]),
        ("isolation=inlin", ["isolation=inlin", "did you mean inline?"]),
        ("workload.num_requests=1e400", ["workload.num_requests="]),
        ("kv_cache.block_size=0", ["kv_cache.block_size=0", "at least 1"]),
        ("telemetry.rate_hz=1e9", ["telemetry.rate_hz=1000000000.0", "at most 1000", "nearest: 1000"]),
        ("kv_cache.block_size=glob(*)", ["kv_cache.block_size=glob(*)", "sweeps over nothing"]),
        ("batching=glob(x*)", ["batching=glob(x*)", "sweeps over nothing"]),
        ("kv_cache.block_size=range(3,1)", ["kv_cache.block_size=range(3,1)", "sweeps over nothing"]),
    ],
)
def test_what_a_value_may_be_is_said(argument: str, parts: list[str], capsys: Any) -> None:
    line = said(["study=none", argument], capsys)
    for part in parts:
        assert part in line
