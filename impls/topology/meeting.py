"""How the router and workers of other hosts find each other: they dial in, show the key, and say what they run."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import torch

KEY = "HARNESS_WORKER_KEY"  # the environment variable that holds what both sides have to know
WAITING_S = 60.0  # for all workers to have dialled in
GREETING_S = 5.0  # for one of them to have shown the key and said its name
SILENT_S = 15  # a host that has answered nothing for so long is lost
CODE = ("impls", "harness")  # folders whose functions travel by name, and what those compute with
KINDS = {".py", ".c", ".h", ".safetensors"}


class Refused(RuntimeError):
    """These two will never work together; the message says why."""


def key_of(environment: Mapping[str, str]) -> bytes:
    """RuntimeError if there is none."""
    if not environment.get(KEY):
        raise RuntimeError(f"{KEY} is not set: the same secret on every host, without which no worker is let in")
    return environment[KEY].encode()


def address_of(text: object) -> tuple[str, int]:
    """ValueError, in words, for what is no address of one host and port."""
    host, _, port = str(text).rpartition(":")
    if not host or ":" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("must be <address>:<port>, as 192.168.0.10:29400 (IPv4 or a name)")
    if host in ("0.0.0.0", "*"):
        raise ValueError("must be the address at which other hosts reach this one, not every address that it has")
    return host, int(port)


@cache
def own_versions() -> dict[str, str]:
    """What has to be the same on both sides: plain strings, for who has other code to read as well."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    files = (file for folder in CODE for file in (root / folder).rglob("*") if file.suffix in KINDS)
    for file in sorted(files):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return {"Python": platform.python_version(), "torch": torch.__version__, "code": digest.hexdigest()[:12]}


def listening(host: str, port: int = 0) -> socket.socket:
    """At this address alone; port 0: any. RuntimeError, on one line, if it cannot be had."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise RuntimeError(f"topology.listen: nobody can listen at {host}:{port}: {error.strerror}") from error


def await_workers(listen: str, names: Seq[str]) -> dict[str, Connection]:
    """A connection to each of them, once all have dialled in at ``listen``, where nobody is heard any more then.

    RuntimeError, on one line, if that address cannot be had, if one runs something else than this process does, or if
    one has not come after `WAITING_S`.
    """
    key, found, strangers = key_of(os.environ), dict[str, Connection](), list[str]()
    until = time.monotonic() + WAITING_S
    with listening(*address_of(listen)) as server, ExitStack() as unless_all_come:
        while missing := [name for name in names if name not in found]:
            try:
                if (left := until - time.monotonic()) <= 0:  # however many are still in the queue
                    raise TimeoutError
                server.settimeout(left)
                caller, _ = server.accept()
            except TimeoutError:
                others = "".join(f"; {stranger}" for stranger in dict.fromkeys(strangers))
                who = f"worker {missing[0]} has not dialled in"
                raise RuntimeError(f"{who} at topology.listen={listen} within {WAITING_S:g} s{others}") from None
            try:
                connection = unless_all_come.enter_context(_connection(caller))
            except OSError:  # it has gone already
                caller.close()
                continue
            try:
                with _at_most(GREETING_S, connection):
                    name = _greet(connection, key, missing)
                found[name] = connection
            except Refused:
                raise
            except Exception as error:  # whatever it is that came
                strangers.append(f"one that came {_fault(error)}"[:100])
                connection.close()
        unless_all_come.pop_all()
    return found


@contextmanager
def _at_most(seconds: float, connection: Connection) -> Iterator[None]:
    """Whoever is slower, byte by byte or in silence, is cut off: others wait behind it."""

    def cut() -> None:
        with suppress(OSError):  # it has gone by itself
            same.shutdown(socket.SHUT_RDWR)

    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        timer = threading.Timer(seconds, cut)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _fault(error: Exception) -> str:
    if isinstance(error, AuthenticationError):
        return f"has another {KEY}"
    return "said nothing" if isinstance(error, EOFError | BlockingIOError) else f"was none of ours ({error})"


def dial(address: tuple[str, int], name: str, key: bytes) -> Connection:
    """The connection to a router that has let us in. OSError or EOFError: none does, now. Refused: it never will."""
    caller = socket.create_connection(address, timeout=GREETING_S)
    caller.settimeout(None)
    connection = _connection(caller)
    try:
        _limit(connection, socket.SO_RCVTIMEO, WAITING_S)  # others may be greeted first
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        except AuthenticationError as error:
            raise Refused(f"the router has another {KEY}") from error
        except (AssertionError, ValueError) as error:
            raise ConnectionError("who listens there is no router") from error
        connection.send({"name": name, **own_versions()})
        answer = connection.recv()
        if answer:
            raise Refused(str(answer))
        _limit(connection, socket.SO_RCVTIMEO, 0)
    except BaseException:
        connection.close()
        raise
    return connection


def _greet(connection: Connection, key: bytes, missing: Seq[str]) -> str:
    """The name of who has dialled in. Nothing that it says is unpickled before it has shown the key."""
    deliver_challenge(connection, key)
    answer_challenge(connection, key)
    said: dict[str, Any] = connection.recv()
    name = str(said["name"])
    if name not in missing:
        raise ValueError(f"{name} is not awaited")
    differences = {what: own for what, own in own_versions().items() if said.get(what) != own}
    if differences:
        whats = [f"{what} {said.get(what)}, here {own}" for what, own in differences.items()]
        why = f"worker {name} runs something else: {'; '.join(whats)}"
        with suppress(OSError):
            connection.send(why)
        raise Refused(why)
    connection.send("")
    return name


def _connection(caller: socket.socket) -> Connection:
    """What is written is sent at once, and a host that vanishes without a word is noticed (`SILENT_S`)."""
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {
        "TCP_KEEPIDLE": max(1, SILENT_S // 3),
        "TCP_KEEPINTVL": max(1, SILENT_S // 6),
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": SILENT_S * 1000,  # of what was sent and not acknowledged
    }
    for option, value in limits.items():
        if hasattr(socket, option):  # not everywhere
            caller.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(caller.detach())


def limit_sending(connection: Connection, seconds: float) -> None:
    """BlockingIOError, from then on, where nothing was taken out at the other end for so long."""
    _limit(connection, socket.SO_SNDTIMEO, seconds)


def _limit(connection: Connection, option: int, seconds: float) -> None:
    """0: none."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
