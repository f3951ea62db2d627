"""A correct lock, simulated, makes no history with findings in it; one with a fault does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.checker import check
from tests.chaos.history import Event, What
from tests.chaos.story import Finding
from tests.chaos.written import died, event


@dataclass
class Attempt:
    """An attempt as the simulated server and its client know it."""

    who: str
    fence: int = 0
    ends: int = 0
    learnt: bool = False


@dataclass
class Simulation:
    """A lock with a queue and leases, its clients, and the history that they write.

    A client learns of its grant and ends its section when its turn comes: that can be too late.
    """

    limit: int
    choose: Callable[[int], int] = lambda waiting: 0
    spare: int = 0
    time: int = 0
    fence: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)
    events: list[Event] = field(default_factory=list)
    clients: dict[str, Attempt | None] = field(default_factory=lambda: dict.fromkeys("abcd"))
    holders: list[Attempt] = field(default_factory=list)
    queue: list[Attempt] = field(default_factory=list)

    LEASE = 20

    def note(self, what: What, who: str, **more: Any) -> None:
        self.events.append(event(what, self.time, who, limit=self.limit, **more))

    def advance(self, by: int) -> None:
        until = self.time + by
        while due := [h for h in self.holders if h.ends <= until]:
            first = min(due, key=lambda holder: holder.ends)
            self.time = first.ends
            self.free(first)
        self.time = until

    def free(self, holder: Attempt) -> None:
        if holder in self.holders:
            self.holders.remove(holder)
        while self.queue and len(self.holders) < self.limit + self.spare:
            self.grant(self.queue.pop(self.choose(len(self.queue))))

    def grant(self, one: Attempt) -> None:
        self.fence += 1
        one.fence, one.ends = self.fence, self.time + self.LEASE
        self.holders.append(one)

    def step(self, client: str) -> None:
        """Let a client do the next thing: ask, learn of its grant, end its section."""
        one = self.clients[client]
        if one is None:
            one = self.clients[client] = Attempt(f"{client}{next(self.numbers)}")
            self.note("asked", one.who)
            self.advance(1)
            if len(self.holders) < self.limit + self.spare and not self.queue:
                self.grant(one)
            else:
                self.queue.append(one)
                self.advance(1)
                self.note("queued", one.who)
        elif not one.fence:
            pass  # it waits
        elif not one.learnt:
            self.learn(client, one)
        else:
            held = self.time < one.ends - 1
            self.note("end", one.who, fence=one.fence, held=held, until=one.ends - 1)
            self.advance(1)
            self.free(one)
            self.clients[client] = None

    def learn(self, client: str, one: Attempt) -> None:
        if self.time >= one.ends - 1:
            self.note("gave_up", one.who)
            self.clients[client] = None
            return
        one.learnt = True
        self.note("granted", one.who, fence=one.fence)
        self.note("begin", one.who, fence=one.fence, until=one.ends - 1)

    def walk_away(self, client: str) -> None:
        one = self.clients[client]
        if one in self.queue:
            self.note("gave_up", one.who, until=self.time)
            self.advance(1)
            if one in self.queue:
                self.queue.remove(one)
            elif one in self.holders:
                self.free(one)
            self.clients[client] = None

    def kill(self, client: str) -> None:
        one, self.clients[client] = self.clients[client], None
        self.events.append(died(client, self.time))
        self.advance(1)
        if one in self.queue:
            self.queue.remove(one)
        elif one is not None:
            self.free(one)

    def finish(self) -> None:
        for client in self.clients:
            self.kill(client)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["step"] * 8 + ["walk_away", "kill"]),
        st.sampled_from("abcd"),
        st.sampled_from([1, 1, 2, 5, 25]),
    ),
    max_size=60,
)


def simulate(steps: list[tuple[str, str, int]], simulation: Simulation) -> list[Finding]:
    for what, client, time in steps:
        simulation.advance(time)
        getattr(simulation, what)(client)
    simulation.finish()
    return check(simulation.events)


@given(STEPS, st.integers(1, 2))
def test_a_correct_lock_has_no_findings(steps: list[tuple[str, str, int]], limit: int) -> None:
    assert simulate(steps, Simulation(limit)) == []


CROWD = [("step", client, 1) for client in "abcdababddccbb"]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [({"spare": 1}, "overlap"), ({"choose": lambda n: n - 1}, "not first come, first served")],
)
def test_a_faulty_lock_has_findings(fault: dict[str, Any], kind: str) -> None:
    assert simulate(CROWD, Simulation(1)) == []
    assert kind in {finding.kind for finding in simulate(CROWD, Simulation(1, **fault))}


# Around it.
