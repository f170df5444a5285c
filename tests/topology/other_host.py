"""Another host, as far as Linux can play one: its own network, joined by a cable, and its own monotonic clock."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_INDEX = itertools.count()
AHEAD_S = 100_000  # of this host's monotonic clock


@dataclass(frozen=True)
class OtherHost:
    """``here``: this host's address on the cable. ``by``: the command that starts another one over there."""

    name: str
    here: str
    by: tuple[str, ...]

    def unplug(self) -> None:
        """Nothing passes any more, and nobody is told."""
        _run("ip", "-n", self.name, "link", "set", self.name, "down")


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """Skips, with the reason, where there can be none."""
    if sys.platform != "linux" or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("another host needs Linux, with ip and unshare")
    index = next(_INDEX)
    number, name = 8 * os.getpid() + index, f"h{os.getpid()}-{index}"
    net = f"198.{18 + number // 256 % 2}.{number % 256}"  # of the range for tests of network devices
    clock = ("unshare", "-T", "--monotonic", str(AHEAD_S), "--fork")
    try:
        _run(*clock, "true")
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no namespaces here: {error.stderr.strip()}")
    try:
        _run("ip", "link", "add", f"{name}r", "type", "veth", "peer", "name", name, "netns", name)
        _run("ip", "address", "add", f"{net}.1/30", "dev", f"{name}r")
        _run("ip", "-n", name, "address", "add", f"{net}.2/30", "dev", name)
        for command in (("ip", "link", "set", f"{name}r"), ("ip", "-n", name, "link", "set", name)):
            _run(*command, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        yield OtherHost(name, f"{net}.1", (*clock, "ip", "netns", "exec", name))
    finally:
        subprocess.run(["ip", "link", "delete", f"{name}r"], check=False, capture_output=True)
        _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
