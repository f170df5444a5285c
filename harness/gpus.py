"""Which devices an arm computes on, and what is known of a GPU from outside.

Another process is asked: a GPU context of this one would lie beside every trial, half a GB of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from harness.fork_server import in_another_process


def devices_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The device of every engine that a resolved arm will have on this host, as torch names it, by its worker's name;
    of a single one, under no name. ``cuda`` is the first GPU.
    """
    from impls.build import has_workers, locate  # imports torch: a mistake in a command is told without that wait

    if not has_workers(config):
        return {"": str(config["device"]["name"])}
    return dict(locate(config["topology"]).devices(config))


def physical_name(device: str) -> str:
    """The same for every process of this machine, whichever devices it sees and in whatever order.

    Of a MIG slice it may be its GPU's, as the driver tells it: slices share power and clocks.
    """
    return f"cuda-{gpu_uuids()[ordinal(device)]}" if device.startswith("cuda") else device


def ordinal(device: str) -> int:
    """CUDA's number of the device, among those that are visible."""
    return int(device.partition(":")[2] or 0)


@cache
def gpu_uuids() -> tuple[str, ...]:
    """Of the GPUs that are visible, by ordinal."""
    return in_another_process(_visible_uuids)


@cache
def gpu_memory(number: int) -> tuple[int, int]:
    """(free, total) bytes, as they were when they were first asked for."""
    import torch

    free, total = in_another_process(partial(torch.cuda.mem_get_info, number))
    return int(free), int(total)


def _visible_uuids() -> tuple[str, ...]:
    import torch

    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
