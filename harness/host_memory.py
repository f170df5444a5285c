"""The main memory that this process may have: the machine's, or less where a control group (a container) limits it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

MEMBERSHIP = Path("/proc/self/cgroup")  # a line for each hierarchy: number, controllers, this process's group
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Files:
    """Of a group: its limit, what it uses, and the row of memory.stat with what of that the kernel gives up at once."""

    limit: str
    used: str
    reclaimable: str


V1 = Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = Files("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True)
class Memory:
    """In bytes."""

    total: int
    available: int


def host_memory() -> Memory:
    """The least of what the machine has and what this process's control groups allow it."""
    machine = psutil.virtual_memory()
    allowed = [Memory(int(machine.total), int(machine.available)), *_group_limits()]
    return Memory(min(memory.total for memory in allowed), max(0, min(memory.available for memory in allowed)))


def _group_limits() -> Iterator[Memory]:
    """Of each group that this process is in: a limit holds for all groups below."""
    for folder, files in _groups():
        with suppress(OSError, ValueError):  # it has no limit: no such file, or "max" in it
            limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield Memory(limit, limit - used + int(stat.get(files.reclaimable, 0)))


def _groups() -> Iterator[tuple[Path, Files]]:
    """In a container the path may be the host's, of which only the end is mounted here: as the mount itself."""
    if not MEMBERSHIP.exists():
        return
    for line in MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (GROUPS / "memory", V1) if controllers else (GROUPS, V2)
        below = PurePosixPath(path).parts[1:]
        for depth in range(1 + len(below)):
            yield root.joinpath(*below[:depth]), files
