"""What memory a container leaves: fake control groups beside a machine of 64 GiB, 48 of them available."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import harness.host_memory as host_memory
from harness.host_memory import Memory

GIB = 2**30
MACHINE = Memory(64 * GIB, 48 * GIB)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(**vars(MACHINE)))
    return tmp_path


def v2(folder: Path, limit: int | str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")


def v1(folder: Path, limit: int, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 3\ntotal_inactive_file {cached}\n")


def member(root: Path, *lines: str) -> None:
    (root / "membership").write_text("".join(f"{line}\n" for line in lines))


def test_without_control_groups_it_is_the_machines(root: Path) -> None:
    assert host_memory.host_memory() == MACHINE
    member(root, "0::/user.slice")
    assert host_memory.host_memory() == MACHINE


def test_a_container_has_its_limit_and_what_it_has_not_used(root: Path) -> None:
    member(root, "0::/")
    v2(root, 8 * GIB, 3 * GIB)
    assert host_memory.host_memory() == Memory(8 * GIB, 5 * GIB)


def test_files_that_the_kernel_keeps_for_a_container_are_available(root: Path) -> None:
    """Else a model that has just been read would leave no memory for itself."""
    member(root, "0::/")
    v2(root, 8 * GIB, 7 * GIB, cached=4 * GIB)
    assert host_memory.host_memory().available == 5 * GIB


def test_a_limit_above_the_machine_or_none_takes_nothing_away(root: Path) -> None:
    member(root, "0::/job")
    v2(root / "job", 500 * GIB, GIB)
    v2(root, "max", GIB)
    assert host_memory.host_memory() == MACHINE


def test_the_tightest_of_all_groups_above_counts(root: Path) -> None:
    """Each in its own way: the one in the middle allows least, the outermost has least left."""
    member(root, "0::/pod/container/task")
    v2(root / "pod", 32 * GIB, 31 * GIB)
    v2(root / "pod" / "container", 16 * GIB, 2 * GIB)
    v2(root / "pod" / "container" / "task", "max", GIB)
    assert host_memory.host_memory() == Memory(16 * GIB, GIB)


def test_control_groups_of_the_first_version(root: Path) -> None:
    """The path is the host's; in the container its group is mounted as the root."""
    member(root, "5:devices:/", "4:cpu,memory:/docker/0123", "1:name=systemd:/", "0::/")
    v1(root / "memory", 6 * GIB, 2 * GIB, cached=GIB)
    assert host_memory.host_memory() == Memory(6 * GIB, 5 * GIB)
    v1(root / "memory" / "docker" / "0123", 9223372036854771712, GIB)  # no limit, in its words
    assert host_memory.host_memory() == Memory(6 * GIB, 5 * GIB)


def test_more_used_than_allowed_leaves_nothing(root: Path) -> None:
    member(root, "0::/")
    v2(root, 2 * GIB, 3 * GIB)  # a limit that was lowered
    assert host_memory.host_memory() == Memory(2 * GIB, 0)
