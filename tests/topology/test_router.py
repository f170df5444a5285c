"""The router against simulated workers: whatever is submitted ends once, and nothing stays held for it."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impls.request import Request, SamplingParams
from impls.seams import Emission, StepResult, StepStats
from impls.topology.messages import Drop, HandOver, Order, Resume, Stepped, Submit
from impls.topology.router import Router


class FakeWorker:
    """Begins, holds, takes and ends requests in the order given; ``room`` is how many it can have at work at once."""

    def __init__(self, name: str, *, hands_over: bool, room: int) -> None:
        self.name, self.hands_over, self.room = name, hands_over, room
        self.inbox: list[Order] = []
        self.obeyed = 0
        self.waiting: list[Submit | Resume] = []
        self.working: dict[str, list[int]] = {}  # request -> tokens that it still has to make
        self.held: set[str] = set()
        self.unreachable: set[str] = set()

    def step(self) -> Stepped:
        for order in self.inbox:
            if isinstance(order, Drop):
                self.waiting = [o for o in self.waiting if o.request.request_id != order.request_id]
                self.working.pop(order.request_id, None)
                self.held.discard(order.request_id)
            else:
                assert isinstance(order, Submit | Resume)
                self.waiting.append(order)
        self.obeyed += len(self.inbox)
        self.inbox.clear()
        taken, broken = [], {}
        emissions, handed = [], []
        while self.waiting and len(self.working) + len(self.held) < self.room:
            order = self.waiting.pop(0)
            left = order.request.sampling.max_tokens
            if isinstance(order, Resume):
                if order.source in self.unreachable:
                    broken[order.source] = "Timed out"
                    emissions.append(Emission(order.request.request_id, (), 0.0, "error", "Timed out"))
                    continue
                taken.append(order.request.request_id)
                left -= len(order.token_ids)
            self.working[order.request.request_id] = [left]
        for request_id, left in list(self.working.items()):
            left[0] -= 1
            ends = left[0] == 0
            emissions.append(Emission(request_id, (7,), 0.0, "length" if ends else None))
            if ends:
                del self.working[request_id]
            elif self.hands_over:
                del self.working[request_id]
                self.held.add(request_id)
                handed.append(HandOver(request_id, (7,), (1, 2)))
        stats = StepStats(0.0) if emissions else None
        return Stepped(StepResult(emissions, stats), self.obeyed, tuple(handed), tuple(taken), broken)


class Simulation:
    def __init__(self, entries: int, decoders: int, room: int) -> None:
        names = [f"prefill{i}" for i in range(entries)], [f"decode{i}" for i in range(decoders)]
        self.router = Router(*names)
        self.workers = {
            name: FakeWorker(name, hands_over=bool(decoders) and name in names[0], room=room)
            for name in (*names[0], *names[1])
        }
        self.pipes: dict[str, deque[Stepped]] = {name: deque() for name in self.workers}
        self.submitted: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.tokens: Counter[str] = Counter()
        self.ends: dict[str, str] = {}
        self.known_broken: set[tuple[str, str]] = set()

    def submit(self, max_tokens: int) -> None:
        request = Request(f"r{len(self.submitted)}", (1, 2, 3), SamplingParams(max_tokens=max_tokens))
        self.submitted[request.request_id] = request
        self.router.submit(request, 0.0)
        self.settle()

    def compute(self, name: str) -> None:
        """A step whose report is on its way: what the router decides meanwhile comes too late for it."""
        self.pipes[name].append(self.workers[name].step())

    def deliver(self, name: str) -> None:
        while self.pipes[name]:
            report = self.pipes[name].popleft()
            self.known_broken |= {(source, name) for source in report.broken}
            self.router.stepped(name, report, 0.0)
            self.settle()

    def step(self, name: str) -> None:
        self.compute(name)
        self.deliver(name)

    def kill(self, name: str) -> None:
        """What it had sent is heard before its end is, in which it may have been given up."""
        del self.workers[name]
        self.deliver(name)
        if name not in self.router.deaths:
            self.router.died(name, "died (SIGKILL)", 0.0)
        self.settle()

    def abort(self, request_id: str) -> None:
        if request_id not in self.ends:
            self.aborted.add(request_id)
        self.router.abort(request_id)
        self.settle()

    def settle(self) -> None:
        for name, reason in self.router.cut_off.items():
            self.workers.pop(name, None)
            self.router.died(name, reason, 0.0)
        orders, self.router.orders = self.router.orders, []
        for name, order in orders:
            if isinstance(order, Resume):
                assert (order.source, name) not in self.known_broken, "handed over where nothing passes"
            if name in self.workers:
                self.workers[name].inbox.append(order)
        while self.router.results:
            for emission in self.router.results.popleft().emissions:
                assert emission.request_id not in self.ends, "an emission after the end"
                assert emission.request_id not in self.aborted, "an emission after the abort"
                self.tokens[emission.request_id] += len(emission.token_ids)
                if emission.finish_reason is not None:
                    self.ends[emission.request_id] = emission.finish_reason

    def run_out(self) -> None:
        for _ in range(200):
            if not self.router.has_open:
                break
            for name in list(self.workers):
                self.step(name)
        for name in list(self.workers):  # what was said last
            self.step(name)


@settings(max_examples=150)
@given(
    *(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(0, 4), st.integers(0, 4)),
    st.randoms(use_true_random=False),
)
def test_every_request_ends_once_whoever_dies_and_whatever_breaks(
    entries: int, decoders: int, room: int, kills: int, breaks: int, chance: random.Random
) -> None:
    simulation = Simulation(entries, decoders, room)
    for _ in range(60):
        action = chance.random()
        names = list(simulation.workers)
        if action < 0.3:
            simulation.submit(chance.randint(1, 5))
        elif action < 0.38 and simulation.submitted:
            simulation.abort(chance.choice(list(simulation.submitted)))
        elif action < 0.42 and kills and names:
            kills -= 1
            simulation.kill(chance.choice(names))
        elif action < 0.46 and breaks and names:
            breaks -= 1
            simulation.workers[chance.choice(names)].unreachable.add(f"prefill{chance.randrange(entries)}")
        elif names:
            chance.choice([simulation.compute, simulation.compute, simulation.deliver])(chance.choice(names))
    simulation.run_out()
    assert simulation.ends.keys() | simulation.aborted == simulation.submitted.keys()
    assert not simulation.ends.keys() & simulation.aborted
    for request_id, reason in simulation.ends.items():
        if reason == "length":
            assert simulation.tokens[request_id] == simulation.submitted[request_id].sampling.max_tokens
        else:
            assert reason == "error" and (simulation.router.deaths or simulation.known_broken)
    for worker in simulation.workers.values():
        assert not worker.held and not worker.working and not worker.waiting, f"{worker.name} still has something"


def test_a_decoder_gets_what_it_has_fewest_of_and_an_entry_its_turn() -> None:
    simulation = Simulation(2, 2, room=8)
    for _ in range(4):
        simulation.submit(5)
    assert [len(simulation.workers[f"prefill{i}"].inbox) for i in range(2)] == [2, 2]
    for name in ("prefill0", "prefill1"):
        simulation.step(name)
    assert [len(simulation.workers[f"decode{i}"].inbox) for i in range(2)] == [2, 2]


def test_blocks_stay_held_until_they_were_taken() -> None:
    simulation = Simulation(1, 1, room=2)
    for _ in range(3):
        simulation.submit(3)
    prefill, decode = simulation.workers["prefill0"], simulation.workers["decode0"]
    simulation.step("prefill0")
    simulation.step("prefill0")
    assert prefill.held == {"r0", "r1"} and len(prefill.waiting) == 1  # no room for the third before they are taken
    simulation.step("decode0")
    assert decode.working.keys() == {"r0", "r1"}
    simulation.step("prefill0")
    assert prefill.held == {"r2"}


def test_a_dead_decoder_fails_what_it_had_and_the_prefill_worker_lets_go() -> None:
    simulation = Simulation(1, 1, room=2)
    simulation.submit(3)
    simulation.step("prefill0")
    simulation.kill("decode0")
    assert simulation.ends == {"r0": "error"}
    simulation.step("prefill0")
    assert not simulation.workers["prefill0"].held
    simulation.submit(3)
    assert simulation.ends["r1"] == "error"  # nobody is left to end it, so nobody begins it


def test_what_a_dead_prefill_worker_had_handed_over_goes_on() -> None:
    simulation = Simulation(1, 1, room=1)
    simulation.submit(3)
    simulation.step("prefill0")
    simulation.kill("prefill0")
    simulation.run_out()
    assert simulation.ends == {"r0": "length"} and simulation.tokens["r0"] == 3


def test_where_nothing_passes_nothing_is_sent_and_another_pair_is_used() -> None:
    simulation = Simulation(2, 2, room=9)
    simulation.workers["decode0"].unreachable.add("prefill0")
    simulation.submit(3)
    simulation.step("prefill0")
    simulation.step("decode0")
    assert simulation.ends == {"r0": "error"} and not simulation.router.cut_off
    for _ in range(4):
        simulation.submit(3)
    assert not simulation.workers["prefill0"].waiting and len(simulation.workers["prefill1"].inbox) == 4
    simulation.run_out()
    assert list(simulation.ends.values()) == ["error", *["length"] * 4]


def test_what_had_begun_where_a_pair_broke_goes_on_over_another() -> None:
    simulation = Simulation(1, 2, room=9)
    simulation.workers["decode0"].unreachable.add("prefill0")
    for _ in range(2):
        simulation.submit(3)
    simulation.step("prefill0")
    simulation.submit(3)
    simulation.step("decode0")
    simulation.run_out()
    assert simulation.ends == {"r0": "error", "r1": "length", "r2": "length"}


def test_an_entry_that_reaches_nobody_is_cut_off_with_what_it_has() -> None:
    simulation = Simulation(1, 2, room=9)
    simulation.workers["decode0"].unreachable.add("prefill0")
    simulation.submit(3)
    simulation.step("prefill0")
    simulation.submit(3)
    simulation.step("decode0")
    simulation.kill("decode1")
    assert simulation.ends == {"r0": "error", "r1": "error"}
    why = {"prefill0": "was given up: decode0 gets nothing from it (Timed out)", "decode1": "died (SIGKILL)"}
    assert simulation.router.deaths == why
    simulation.submit(3)
    assert simulation.ends["r2"] == "error"


@pytest.mark.parametrize("decoders", [0, 1])
def test_what_is_said_of_an_aborted_request_is_not_taken_for_the_next_one_of_that_name(decoders: int) -> None:
    simulation = Simulation(1, decoders, room=4)
    entry = "prefill0"
    simulation.submit(3)
    simulation.compute(entry)  # its first token, and maybe its hand-over, is on its way
    simulation.router.abort("r0")
    simulation.router.submit(Request("r0", (9, 9), SamplingParams(max_tokens=3)), 0.0)
    simulation.settle()
    simulation.deliver(entry)
    assert simulation.tokens["r0"] == 0 and all(not w.inbox for n, w in simulation.workers.items() if n != entry)
    if decoders:
        simulation.step(entry)
        simulation.compute("decode0")  # and here its second
        simulation.router.abort("r0")
        simulation.router.submit(Request("r0", (9, 9), SamplingParams(max_tokens=3)), 0.0)
        simulation.settle()
        simulation.tokens.clear()
        simulation.deliver("decode0")
        assert simulation.tokens["r0"] == 0
    simulation.run_out()
    assert simulation.ends == {"r0": "length"} and simulation.tokens["r0"] == 3
    for worker in simulation.workers.values():
        assert not worker.held and not worker.working and not worker.waiting


def test_an_id_that_is_open_is_refused() -> None:
    router = Router(["replica0"])
    router.submit(Request("same", (1,)), 0.0)
    with pytest.raises(ValueError, match="already in the workers"):
        router.submit(Request("same", (1,)), 0.0)
