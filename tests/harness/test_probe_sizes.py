"""How much a probe computes and copies: by the caches that a machine tells of, within its free memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import harness.probe_sizes as probe_sizes
from harness.probe_sizes import copy_bytes, gemm_sizes, last_level_bytes

MIB, GIB = 2**20, 2**30


def machine(monkeypatch: pytest.MonkeyPatch, root: Path, *, sockets: int, l3: str | None, free: int) -> None:
    """Four processors a socket, who share its L3; each has an L2 of its own."""
    for cpu in range(4 * sockets):
        socket = cpu // 4
        caches = [("2", "1024K", str(cpu))]
        if l3 is not None:
            caches.append(("3", l3, f"{4 * socket}-{4 * socket + 3}"))
        for number, (level, size, shared) in enumerate(caches):
            folder = root / f"cpu{cpu}" / "cache" / f"index{number}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(probe_sizes, "CPUS", root)
    monkeypatch.setattr(probe_sizes, "memory_free_bytes", lambda device: free)


@pytest.mark.parametrize(
    ("sockets", "l3", "free", "copied"),
    [
        (1, "32768K", 64 * GIB, 128 * MIB),
        (2, "32768K", 64 * GIB, 256 * MIB),
        (2, "393216K", 64 * GIB, 2 * GIB),  # 3 GiB are more than it takes
        (1, "32768K", 800 * MIB, 100 * MIB),  # both tensors in a quarter of what is free
        (1, None, 64 * GIB, 512 * MIB),
        (1, "", 64 * GIB, 512 * MIB),
    ],
)
def test_a_copy_is_four_times_what_all_l3_caches_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sockets: int, l3: str | None, free: int, copied: int
) -> None:
    machine(monkeypatch, tmp_path, sockets=sockets, l3=l3, free=free)
    assert copy_bytes("cpu") == copied
    assert gemm_sizes("cpu") == (512, 1024)


def test_a_machine_that_tells_nothing_of_its_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe_sizes, "CPUS", tmp_path / "nothing")
    assert last_level_bytes("cpu") == 0


@pytest.mark.parametrize(
    ("free", "copied", "size"),
    [(100 * GIB, 200 * MIB, 8192), (4 * GIB, 200 * MIB, 4096), (400 * MIB, 50 * MIB, 2048), (MIB, MIB // 8, 1024)],
)
def test_a_gpu_is_filled_as_far_as_its_free_memory_allows(
    monkeypatch: pytest.MonkeyPatch, free: int, copied: int, size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 200 * GIB))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: [None, SimpleNamespace(L2_cache_size=50 * MIB)][device]
    )
    assert copy_bytes("cuda") == copied
    assert gemm_sizes("cuda") == (size, size)
