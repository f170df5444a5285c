"""Who is let in as a worker of another host, and what is said of those who are not. Both sides in this process."""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import pytest
from joiners import free_port

from harness.drive import RealClock
from impls.request import Request, SamplingParams
from impls.topology import join, meeting
from impls.topology.clocks import ShiftedClock, compare
from impls.topology.handles import RemoteWorker
from impls.topology.meeting import KEY, Refused, address_of, await_workers, dial, own_versions
from impls.topology.replicas import Replicas
from impls.topology.router import Router

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "right")
    monkeypatch.setattr(meeting, "GREETING_S", 0.5)
    monkeypatch.setattr(meeting, "WAITING_S", 5.0)


@pytest.fixture
def router() -> Any:
    """Begins to wait for workers; (address, what comes of it)."""
    with ThreadPoolExecutor(1) as threads:

        def begin(*names: str) -> tuple[tuple[str, int], Future[dict[str, Connection]]]:
            address = HOST, free_port()
            return address, threads.submit(await_workers, f"{HOST}:{address[1]}", names)

        yield begin


def until_heard(action: Callable[[], Any]) -> Any:
    """The router's thread may not listen yet."""
    for _ in range(500):
        with suppress(ConnectionRefusedError):
            return action()
        time.sleep(0.01)
    raise AssertionError("nobody listens")


def test_who_shows_the_key_is_let_in_by_name_and_nobody_is_heard_afterwards(router: Any) -> None:
    address, found = router("decode0", "decode1")
    theirs = [until_heard(lambda name=name: dial(address, name, b"right")) for name in ("decode1", "decode0")]
    ours = found.result()
    assert ours.keys() == {"decode0", "decode1"}
    ours["decode1"].send("for decode1")
    assert theirs[0].recv() == "for decode1"
    with pytest.raises(ConnectionRefusedError):
        dial(address, "decode0", b"right")
    for connection in (*theirs, *ours.values()):
        connection.close()


def test_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "WAITING_S", 0.2)
    listen = f"{HOST}:{free_port()}"
    told = f"^worker decode0 has not dialled in at topology.listen={listen} within 0.2 s$"
    with pytest.raises(RuntimeError, match=told):
        await_workers(listen, ["decode0"])
    with pytest.raises(RuntimeError, match=told):
        await_workers(listen, ["decode0"])  # the port is free again


def test_another_key_opens_nothing_and_both_sides_are_told(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "WAITING_S", 1.0)
    address, found = router("decode0")
    with pytest.raises(Refused, match=f"^the router has another {KEY}$"):
        until_heard(lambda: dial(address, "decode0", b"wrong"))
    with pytest.raises(RuntimeError, match=f"within 1 s; one that came has another {KEY}$"):
        found.result()


def test_strangers_are_passed_over(router: Any) -> None:
    address, found = router("decode0")
    silent = until_heard(lambda: socket.create_connection(address))
    with socket.create_connection(address) as web, suppress(ConnectionError):
        web.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        web.recv(1000)
    with pytest.raises(EOFError):
        dial(address, "decode7", b"right")
    dial(address, "decode0", b"right").close()
    assert found.result().keys() == {"decode0"}
    silent.close()


def test_who_says_a_byte_now_and_then_holds_nobody_up(router: Any) -> None:
    """Each byte would begin a time-out of its own anew."""
    address, found = router("decode0")
    with until_heard(lambda: socket.create_connection(address)) as slow, ThreadPoolExecutor(1) as threads:

        def drip() -> None:
            with suppress(OSError):
                slow.sendall(struct.pack("!i", 255))  # so many bytes are to come
                for _ in range(100):
                    slow.sendall(b"\0")
                    time.sleep(0.1)

        dripping = threads.submit(drip)
        began = time.monotonic()
        dial(address, "decode0", b"right").close()
        assert found.result().keys() == {"decode0"} and time.monotonic() - began < 4
        slow.close()
        dripping.result()


def test_a_queue_of_silent_callers_makes_nobody_wait_for_longer(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "WAITING_S", 1.2)
    address, found = router("decode0")
    began = time.monotonic()
    mute = [until_heard(lambda: socket.create_connection(address)) for _ in range(12)]
    with pytest.raises(RuntimeError, match=r"has not dialled in .*; one that came said nothing$"):
        found.result()
    assert time.monotonic() - began < 4  # all of them would take 6 s
    for caller in mute:
        caller.close()


def test_strangers_are_told_of_where_nobody_else_comes(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "WAITING_S", 1.0)
    address, found = router("decode0")
    with pytest.raises(EOFError):
        until_heard(lambda: dial(address, "decode7", b"right"))
    with pytest.raises(RuntimeError, match=r"; one that came was none of ours \(decode7 is not awaited\)$"):
        found.result()


def hello(address: tuple[str, int], said: object) -> str:
    connection = Connection(until_heard(lambda: socket.create_connection(address)).detach())
    answer_challenge(connection, b"right")
    deliver_challenge(connection, b"right")
    connection.send(said)
    return str(connection.recv())


@pytest.mark.parametrize("what", ["Python", "torch", "code"])
def test_who_runs_something_else_is_refused_and_both_sides_are_told(router: Any, what: str) -> None:
    address, found = router("decode0")
    answer = hello(address, {"name": "decode0", **own_versions(), what: "1.2.3"})
    assert answer == f"worker decode0 runs something else: {what} 1.2.3, here {own_versions()[what]}"
    with pytest.raises(RuntimeError, match=f"^{re.escape(answer)}$"):
        found.result()


def test_an_address_that_is_not_this_hosts() -> None:
    with pytest.raises(RuntimeError, match=r"^topology\.listen: nobody can listen at 192\.0\.2\.1:29400: \w"):
        await_workers("192.0.2.1:29400", ["decode0"])
    for text in ("decode0", ":29400", "host:0", "host:port", "0.0.0.0:29400", "::1:29400"):
        with pytest.raises(ValueError, match="must be"):
            address_of(text)


def test_the_command_says_what_is_wrong_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert join.main([f"{HOST}", "--name", "decode0"]) == 2
    monkeypatch.delenv(KEY)
    assert join.main([f"{HOST}:29400", "--name", "decode0"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{HOST}: must be <address>:<port>") and second.startswith(f"{KEY} is not set")


class Counting:
    """A clock that others read with a delay before and after."""

    def __init__(self) -> None:
        self.shown = 0.0

    def now(self) -> float:
        return self.shown

    def sleep_until(self, deadline_s: float) -> None:
        self.shown = deadline_s


def test_the_quickest_of_several_answers_tells_how_far_a_clock_is_off_and_how_sure_that_is() -> None:
    clock, ways = Counting(), iter([(0.5, 0.1), (0.001, 0.003), *[(0.2, 0.2)] * 100])

    def ask() -> float:
        there, back = next(ways)
        clock.shown += there
        shown = clock.shown - 1000.0
        clock.shown += back
        return shown

    found = compare(clock, ask)
    assert found.error_s == pytest.approx(0.002) and abs(found.shift_s - 1000.0) <= found.error_s + 1e-9
    other = Counting()
    shifted = ShiftedClock(other, found.shift_s)
    shifted.sleep_until(2000.0)
    assert shifted.now() == pytest.approx(2000.0) and other.shown == pytest.approx(1000, abs=0.01)


@pytest.mark.parametrize("error", [TimeoutError(110, "Connection timed out"), OSError(113, "No route to host")])
def test_a_host_that_cannot_be_sent_to_loses_its_worker_and_not_the_trial(error: OSError) -> None:
    class Unreachable:
        def send(self, order: object) -> None:
            raise error

        def close(self) -> None: ...

    group: Any = object.__new__(Replicas)
    group.clock, group.router, group._clocks = RealClock(), Router(["replica0"]), {}
    group._connections, group._handles = {"replica0": Unreachable()}, {"replica0": RemoteWorker()}
    group.add_request(Request("a", (1, 2), SamplingParams(max_tokens=2)))
    (emission,) = group.step(0.0).emissions
    assert emission.error == f"worker replica0 was lost, on another host: {error.strerror}"
    assert not group.has_work
